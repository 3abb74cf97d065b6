// One set of strokes, two papers: a canvas, and SVG text. What is seen and what is saved are drawn by the same code.

const FONT = 'system-ui, -apple-system, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif';

/** @typedef {{fill?: string, stroke?: string, width?: number, alpha?: number, radius?: number, dash?: number[]}} Style */
/** @typedef {{size?: number, fill?: string, align?: "start" | "middle" | "end", weight?: number}} Letters */

/** Draws on a canvas. */
export class CanvasPen {
  /** @param {HTMLCanvasElement} canvas @param {number} width @param {number} height in CSS pixels */
  constructor(canvas, width, height, scale = window.devicePixelRatio || 1) {
    Object.assign(canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
    this.to = canvas.getContext("2d");
    this.to.scale(scale, scale);
  }

  #ink({ fill, stroke, width = 1, alpha = 1, dash = [] }) {
    this.to.globalAlpha = alpha;
    if (fill) {
      this.to.fillStyle = fill;
      this.to.fill();
    }
    if (!stroke) return;
    Object.assign(this.to, { strokeStyle: stroke, lineWidth: width, lineJoin: "round", lineCap: "round" });
    this.to.setLineDash(dash);
    this.to.stroke();
  }

  /** @param {Style} style */
  rect(x, y, w, h, style) {
    this.to.beginPath();
    this.to.roundRect(x, y, Math.max(0, w), Math.max(0, h), style.radius ?? 0);
    this.#ink(style);
  }

  /** @param {[number, number][]} points @param {Style} style */
  line(points, style) {
    this.to.beginPath();
    points.forEach(([x, y], n) => (n ? this.to.lineTo(x, y) : this.to.moveTo(x, y)));
    this.#ink(style);
  }

  /** @param {Style} style */
  circle(x, y, r, style) {
    this.to.beginPath();
    this.to.arc(x, y, r, 0, 2 * Math.PI);
    this.#ink(style);
  }

  /** @param {Letters} letters */
  text(x, y, words, { size = 12, fill = "#000", align = "start", weight = 400 } = {}) {
    Object.assign(this.to, { globalAlpha: 1, fillStyle: fill, font: `${weight} ${size}px ${FONT}`, textAlign: align === "middle" ? "center" : align });
    this.to.fillText(words, x, y);
  }

  /** @param {HTMLCanvasElement} picture drawn with square pixels */
  image(picture, x, y, w, h) {
    Object.assign(this.to, { globalAlpha: 1, imageSmoothingEnabled: false });
    this.to.drawImage(picture, x, y, w, h);
  }
}

const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const short = (x) => Math.round(x * 100) / 100;

/** Writes the same as SVG. */
export class SvgPen {
  constructor(width, height) {
    this.head = `<svg xmlns="http://www.w3.org/2000/svg" width="${short(width)}" height="${short(height)}" viewBox="0 0 ${short(width)} ${short(height)}" font-family="${escaped(FONT)}">`;
    this.body = [];
  }

  #ink({ fill, stroke, width = 1, alpha = 1, dash }) {
    const line = stroke ? ` stroke="${stroke}" stroke-width="${width}" stroke-linejoin="round" stroke-linecap="round"` : "";
    return `fill="${fill ?? "none"}"${line}${alpha < 1 ? ` opacity="${short(alpha)}"` : ""}${dash?.length ? ` stroke-dasharray="${dash}"` : ""}`;
  }

  rect(x, y, w, h, style) {
    const round = style.radius ? ` rx="${style.radius}"` : "";
    this.body.push(`<rect x="${short(x)}" y="${short(y)}" width="${short(Math.max(0, w))}" height="${short(Math.max(0, h))}"${round} ${this.#ink(style)}/>`);
  }

  line(points, style) {
    this.body.push(`<polyline points="${points.map((p) => p.map(short).join(",")).join(" ")}" ${this.#ink(style)}/>`);
  }

  circle(x, y, r, style) {
    this.body.push(`<circle cx="${short(x)}" cy="${short(y)}" r="${short(r)}" ${this.#ink(style)}/>`);
  }

  text(x, y, words, { size = 12, fill = "#000", align = "start", weight = 400 } = {}) {
    this.body.push(`<text x="${short(x)}" y="${short(y)}" font-size="${size}" font-weight="${weight}" text-anchor="${align}" fill="${fill}">${escaped(words)}</text>`);
  }

  image(picture, x, y, w, h) {
    this.body.push(`<image x="${short(x)}" y="${short(y)}" width="${short(w)}" height="${short(h)}" preserveAspectRatio="none" image-rendering="pixelated" href="${picture.toDataURL()}"/>`);
  }

  toString() {
    return `${this.head}\n${this.body.join("\n")}\n</svg>\n`;
  }
}
