// What the page of the routes does: its theme, its search, and entries that open when they are linked to.
{
  const byId = (id) => document.getElementById(id);
  const theme = localStorage.getItem("srm-theme");
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = theme ?? (isDark ? "dark" : "light");

  const entries = [...document.querySelectorAll("details")].map((element) => ({
    element,
    text: element.textContent.toLowerCase(),
    link: document.querySelector(`nav a[href="#${element.id}"]`).parentElement,
  }));

  /** Show the entries that have every word, and open a few. */
  function search() {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = entries.filter(({ text }) => words.every((word) => text.includes(word)));
    for (const { element, link } of entries) element.hidden = link.hidden = true;
    for (const { element, link } of found) {
      element.hidden = link.hidden = false;
      element.open = words.length > 0 && found.length <= 5;
    }
    byId("found").textContent = words.length ? `${found.length} of ${entries.length}` : "";
  }

  function openLinked() {
    const linked = byId(decodeURIComponent(location.hash.slice(1)));
    if (linked?.tagName !== "DETAILS") return;
    if (linked.hidden) {
      byId("search").value = "";
      search();
    }
    linked.open = true;
    linked.scrollIntoView();
  }

  byId("search").addEventListener("input", search);
  addEventListener("hashchange", openLinked);
  openLinked();
}
