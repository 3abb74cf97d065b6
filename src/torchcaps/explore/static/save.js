// Save what the open panel shows: PNG, SVG, or its numbers as JSON.
import { colors } from "./canvas.js";
import { CanvasPen, SvgPen } from "./pen.js";
import { link, state } from "./state.js";
import { encode } from "./wire.js";

const MARGIN = 24;

/** A panel's sheet with its title and margins. @returns {{width: number, height: number, paint: (pen: any) => void}} */
function framed(sheet) {
  const c = colors();
  const [width, height] = [sheet.width + 2 * MARGIN, sheet.height + 2 * MARGIN];
  const paint = (pen) => {
    pen.rect(0, 0, width, height, { fill: c.card });
    pen.text(MARGIN, MARGIN + 16, sheet.title, { size: 17, fill: c.ink, weight: 600 });
    sheet.paint(pen, { x: MARGIN, y: MARGIN + 40 });
  };
  return { width, height, paint };
}

/** @param {"png" | "svg" | "json"} format @returns {Promise<Blob>} */
async function made(sheet, format) {
  const { width, height, paint } = framed(sheet);
  if (format === "json") {
    const { facts, tab, changes, image } = state;
    const whole = { run: facts.name, panel: tab, link: await link(), changes, image: encode(image), ...sheet.numbers() };
    return new Blob([`${JSON.stringify(whole, null, 1)}\n`], { type: "application/json" });
  }
  if (format === "svg") {
    const pen = new SvgPen(width, height);
    paint(pen);
    return new Blob([String(pen)], { type: "image/svg+xml" });
  }
  const canvas = document.createElement("canvas");
  paint(new CanvasPen(canvas, width, height, 2));
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

/** @param {any} sheet of the open panel @param {"png" | "svg" | "json"} format */
export async function save(sheet, format) {
  const url = URL.createObjectURL(await made(sheet, format));
  const anchor = Object.assign(document.createElement("a"), { href: url, download: `${state.facts.name.replaceAll("/", "-")}-${state.tab}.${format}` });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
