"use strict";

/** The round number at or above a rough distance between ticks. @param {number} rough */
function roundStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  const digit = [1, 2, 2.5, 5, 10].find((candidate) => candidate * power >= rough * (1 - 1e-9)) ?? 10;
  return digit * power;
}

/** Round numbers from one place to another, about so many. @param {number} from @param {number} to @param {number} count */
function ticks(from, to, count) {
  if (!(to > from)) return [from];
  const step = roundStep((to - from) / Math.max(1, count));
  const first = Math.ceil(from / step - 1e-9);
  const last = Math.floor(to / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, number) => (first + number) * step);
}

/** Decimals that a distance is written with. @param {number} distance */
const decimalsOf = (distance) =>
  [0, 1, 2, 3, 4, 5].find((digits) => Math.abs(distance * 10 ** digits - Math.round(distance * 10 ** digits)) < 1e-6) ?? 6;

/** What times up to a longest are written in, and how many ms that is. @param {number} longest @returns {[number, string]} */
const timeUnit = (longest) => (longest >= 10000 ? [1000, "s"] : [1, "ms"]);

/** Places on the time axis, with the decimals that tell them apart. @param {number[]} places @param {number} longest */
function timeLabels(places, longest) {
  const [factor, unit] = timeUnit(longest);
  const distance = (places.length > 1 ? places[1] - places[0] : places[0]) / factor;
  return places.map((ms) => `${(ms / factor).toFixed(decimalsOf(distance))} ${unit}`);
}
