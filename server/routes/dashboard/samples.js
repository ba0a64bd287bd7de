// What comes of one request: a card a sample as its text streams in, or counts of whole samples.

import { amount, byId, count, duration } from "./show.js";

const MOST_CHARACTERS = 2 ** 24; // of the distinct answers that are told apart
const ENTRY = 64; // what one takes beside its text, in characters
const MOST_SHOWN = 20; // answers
const MOST_TEXT = 1000; // characters of one
const COUNTS_MS = 250;
const ANNOUNCED_MS = 5000;

/** For those who do not see the page. */
export function announce(message) {
  byId("announcement").textContent = message;
}

/** The samples of a request, drawn now and then, however many events come. */
class Samples {
  constructor(n) {
    this.started = performance.now();
    this.n = n;
    this.ended = 0;
    this.tokens = 0;
  }

  add(event) {
    this.firstAfter ??= (performance.now() - this.started) / 1000;
    this.tokens = event.usage?.completion_tokens ?? this.tokens;
    for (const choice of event.choices) {
      this.ended += Boolean(choice.finish_reason);
      this.take(choice, choice.text ?? choice.delta.content ?? "");
    }
    this.waiting ??= this.later(() => {
      this.waiting = undefined;
      if (!this.isOver) this.draw();
    });
  }

  /** No more come; `why`, if that is not as it should be. */
  finish(why) {
    this.isOver = true;
    if (this.firstAfter !== undefined) this.draw(why);
  }

  /** Say how far it is, and `more`. */
  say(more) {
    const seconds = (performance.now() - this.started) / 1000;
    byId("progress").textContent =
      `${count(this.ended)} of ${count(this.n)} samples ended${more} · ${count(this.tokens)} tokens in ` +
      `${duration(seconds)} · ${amount(this.tokens / seconds)} tokens a second · first after ${duration(this.firstAfter)}`;
  }
}

export class Cards extends Samples {
  /** A card for each, now that the server has taken the request. */
  show(prompt) {
    this.cards = Array.from({ length: this.n }, (_, index) => card(prompt, index));
    byId("samples").replaceChildren(...this.cards.map(({ element }) => element));
    return this.cards;
  }

  later(draw) {
    return requestAnimationFrame(draw);
  }

  take(choice, text) {
    const one = this.cards[choice.index];
    one.fresh += text;
    one.reason = choice.finish_reason ?? one.reason;
  }

  draw(why) {
    for (const one of this.cards) {
      if (one.fresh) one.text.appendData(one.fresh);
      one.fresh = "";
      one.reason ||= why;
      if (one.reason) one.status.textContent = one.reason;
    }
    this.say("");
  }
}

function card(prompt, index) {
  const element = make("article", "card sample");
  element.setAttribute("aria-label", `Sample ${index + 1}`);
  const head = document.createElement("h3");
  const status = make("span", "", "…");
  head.append(`Sample ${index + 1}`, status);
  const text = document.createTextNode("");
  const paragraph = document.createElement("p");
  paragraph.append(make("span", "given", prompt), text);
  element.append(head, paragraph);
  return { element, status, text, fresh: "", reason: "" };
}

/** Whole samples by their text: what is kept, and what is shown, does not grow with their number. */
export class Answers extends Samples {
  answers = new Map(); // from text to {text, count, isRight}
  room = MOST_CHARACTERS;
  right = 0;
  first = Infinity; // number of the first right sample
  announced = performance.now();

  show() {
    this.draw();
    return [];
  }

  later(draw) {
    return setTimeout(draw, COUNTS_MS);
  }

  take({ index, matched, score }, text) {
    const isRight = matched ?? score >= 1;
    this.isJudged ||= matched !== undefined || score !== undefined;
    if (isRight) {
      this.right += 1;
      this.first = Math.min(this.first, index + 1);
    }
    const known = this.answers.get(text);
    if (known) known.count += 1;
    else if (this.room < text.length) this.isFull = true;
    else {
      this.answers.set(text, { text, count: 1, isRight });
      this.room -= text.length + ENTRY;
    }
  }

  draw() {
    const share = (number) => `${amount((100 * number) / this.ended)} %`;
    const first = this.right ? `, the first is sample ${count(this.first)}` : "";
    const judged = this.isJudged ? ` · ${count(this.right)} right (${share(this.right)})${first}` : "";
    this.say(` · ${this.isFull ? "over " : ""}${count(this.answers.size)} distinct${judged}`);
    const shown = this.isJudged
      ? [...this.most(true, MOST_SHOWN / 2), ...this.most(false, MOST_SHOWN / 2)]
      : this.most(false, MOST_SHOWN);
    const top = Math.max(...shown.map((answer) => answer.count));
    byId("samples").replaceChildren(...shown.map((answer) => {
      const element = make("article", "card answer");
      const bar = make("div", "bar");
      bar.append(document.createElement("div"));
      bar.firstChild.style.width = `${(100 * answer.count) / top}%`;
      const verdict = answer.isRight ? " · right" : "";
      const head = make("h3", "", `${count(answer.count)} (${share(answer.count)})${verdict}`);
      element.append(head, bar, make("p", "", answer.text.slice(0, MOST_TEXT)));
      element.classList.toggle("right", answer.isRight);
      return element;
    }));
    if (performance.now() - this.announced < ANNOUNCED_MS) return;
    this.announced = performance.now();
    announce(byId("progress").textContent);
  }

  /** The most frequent answers that are right, or are not. */
  most(isRight, number) {
    const best = [];
    for (const answer of this.answers.values()) {
      if (answer.isRight !== isRight || (best.length === number && answer.count <= best.at(-1).count)) continue;
      const place = best.findIndex((other) => other.count < answer.count);
      best.splice(place < 0 ? best.length : place, 0, answer);
      best.length = Math.min(best.length, number);
    }
    return best;
  }
}

function make(tag, kind, text = "") {
  const element = document.createElement(tag);
  element.className = kind;
  element.textContent = text;
  return element;
}
