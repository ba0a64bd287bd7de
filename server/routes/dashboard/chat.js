// A chat in the playground: what was said, and from which of the last replies it goes on.

import { byId } from "./show.js";

let turns = []; // the messages before the last question
let last = null; // {asked, cards, chosen}: that question, and the replies to it

const message = (role, content) => ({ role, content });

/** The messages of the next request. */
export function messages() {
  const system = byId("system").value.trim();
  return [...(system ? [message("system", system)] : []), ...said(), message("user", byId("message").value)];
}

/** The server took a question: these cards get the replies. */
export function goOn(asked, cards) {
  turns = said();
  last = { asked, cards, chosen: 0 };
  byId("message").value = "";
  if (cards.length > 1) cards.forEach(({ element }, index) => element.append(chooser(index)));
  draw([...turns, message("user", asked)]);
}

/** What was said is all in the list, no longer in cards. */
export function settle() {
  turns = said();
  last = null;
  draw(turns);
}

export function forget() {
  turns = [];
  last = null;
  draw(turns);
}

/** Up to the chosen reply; a question without one is left out. */
function said() {
  const reply = last?.cards[last.chosen]?.text.data;
  return reply ? [...turns, message("user", last.asked), message("assistant", reply)] : turns;
}

function chooser(index) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet choose";
  button.textContent = "Go on from this one";
  button.setAttribute("aria-pressed", index === 0);
  button.addEventListener("click", () => {
    last.chosen = index;
    for (const other of byId("samples").querySelectorAll(".choose")) {
      other.setAttribute("aria-pressed", other === button);
    }
  });
  return button;
}

function draw(shown) {
  byId("turns").replaceChildren(...shown.map(({ role, content }) => {
    const item = document.createElement("li");
    const who = document.createElement("span");
    who.className = "beside";
    who.textContent = role === "user" ? "You" : "Model";
    item.append(who, document.createTextNode(content.trim()));
    return item;
  }));
}
