// Making elements, shorter. Styles go through CSSOM: the content-security policy forbids style attributes.

/**
 * @param {string} tag may carry classes: "div.tile.large"
 * @param {Record<string, any>} [props] on... are listeners, known properties are set, the others are attributes
 * @param {...(Node | string | null | undefined | false)} children
 * @returns {any}
 */
export function h(tag, props = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key in element) element[key] = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child || child === 0));
  return element;
}

/** @param {string} name @returns {any} the element with that data-testid */
export const by = (name) => document.querySelector(`[data-testid="${name}"]`);

/** @param {HTMLElement} parent @param {...any} children */
export const fill = (parent, ...children) => parent.replaceChildren(...children.filter(Boolean));

/** Give a select its options, unless it has them, and its value. @param {HTMLSelectElement} element @param {[any, string][]} options */
export function offer(element, options, value) {
  const key = JSON.stringify(options);
  if (element.dataset.options !== key) {
    fill(element, ...options.map(([v, name]) => h("option", { value: String(v) }, name)));
    element.dataset.options = key;
  }
  element.value = String(value);
}

/** A range with its number beside it. @returns {{row: HTMLElement, input: HTMLInputElement, set: (x: number, rest?: number) => void}} */
export function slider(name, { min, max, step, value = 0, rest = value, unit = "", digits = 0, say, testid, label = name }, moved) {
  const said = h("output.number");
  const input = h("input", { type: "range", min, max, step, "aria-label": label, "data-testid": testid });
  const share = (x) => Math.max(0, Math.min(1, (x - input.min) / (input.max - input.min || 1)));
  const tell = (x) => {
    said.textContent = say ? say(x) : `${(Math.abs(x) < 0.5 * 10 ** -digits ? 0 : x).toFixed(digits).replace("-", "−")}${unit}`;
    const ends = [share(x), share(rest)].sort((a, b) => a - b); // colored from where it rests to where it is
    ["--a", "--b"].forEach((end, n) => input.style.setProperty(end, `calc(8px + (100% - 16px) * ${ends[n].toFixed(4)})`));
  };
  const set = (x, newRest = rest) => {
    rest = newRest;
    input.value = String(x);
    tell(Number(x));
  };
  input.addEventListener("input", () => {
    tell(Number(input.value));
    moved(Number(input.value));
  });
  set(value);
  return { row: h("label.slider", {}, h("span", {}, name), input, said), input, set };
}

/** Run at most once a frame. @param {() => void} work */
export function once(work) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      work();
    });
  };
}

/** Run when nothing has happened for so long. @param {(...a: any[]) => void} work @param {number} ms */
export function later(work, ms) {
  let timer = 0;
  return (...words) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...words), ms);
  };
}

/** Move the focus among children by arrows, Home and End: one stop for Tab. @param {HTMLElement} parent */
export function arrows(parent, { selector = "button", columns = () => 1 } = {}) {
  parent.addEventListener("keydown", (event) => {
    const all = [...parent.querySelectorAll(selector)];
    const at = all.indexOf(document.activeElement);
    const down = columns();
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: down, ArrowUp: -down, Home: -at, End: all.length - 1 - at };
    if (at < 0 || !(event.key in move)) return;
    const to = all[at + move[event.key]];
    event.preventDefault();
    if (!to) return;
    all.forEach((one) => (one.tabIndex = one === to ? 0 : -1));
    to.focus();
    to.dispatchEvent(new CustomEvent("arrived", { bubbles: true }));
  });
}
