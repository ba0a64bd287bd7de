// Swagger UI over openapi.json, in the theme that the dashboard was given.
{
  const theme = localStorage.getItem("srm-theme");
  const isDark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.classList.toggle("dark-mode", isDark);
  SwaggerUIBundle({
    url: "openapi.json",
    dom_id: "#reference",
    deepLinking: true,
    filter: true,
    defaultModelExpandDepth: 2,
    validatorUrl: null, // or it would show the document to a site of its makers
  });
}
