"use strict";

const BYTE_UNITS = /** @type {[number, string][]} */ ([[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]);

/** Three significant digits, without zeros at the end. @param {number} number */
const threeDigits = (number) => String(Number(number.toPrecision(3)));

/** A size in decimal units, as all of monetlite writes it. @param {number} bytes */
function formatBytes(bytes) {
  const magnitude = Math.abs(bytes);
  for (const [factor, unit] of BYTE_UNITS) {
    if (magnitude >= 0.9995 * factor) {
      const scaled = bytes / factor;
      return `${magnitude < 999.5 * factor ? threeDigits(scaled) : scaled.toFixed(0)} ${unit}`;
    }
  }
  return `${bytes.toFixed(0)} B`;
}

/** A latency, as all of monetlite writes it. @param {number} ms */
function formatMs(ms) {
  if (Math.abs(ms) >= 10000) return `${(ms / 1000).toFixed(1)} s`;
  return `${Math.abs(ms) < 999.5 ? threeDigits(ms) : ms.toFixed(0)} ms`;
}

/** With its sign, for differences. @param {number} amount @param {(amount: number) => string} format */
const signed = (amount, format) => `${amount < 0 ? "−" : amount > 0 ? "+" : ""}${format(Math.abs(amount))}`;

/** "1 step", "2 steps". @param {number} count @param {string} noun */
const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** @param {string} text */
const capitalized = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** At most so many characters, the middle left out. @param {string} text @param {number} most */
function shortened(text, most) {
  const characters = Array.from(text);
  if (characters.length <= most) return text;
  const half = Math.max(1, Math.floor((most - 1) / 2));
  return `${characters.slice(0, half).join("")}…${characters.slice(-half).join("")}`;
}
