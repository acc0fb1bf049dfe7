// The small window beside the pointer.
import { make } from "./format.js";

const tip = document.getElementById("tip");

export function showTip(left, top, title, lines) {
  tip.replaceChildren(
    make("div", { className: "top" }, title),
    ...lines.map(([name, value, colour]) => {
      const swatch = colour ? make("span", { className: "swatch" }) : null;
      if (swatch) swatch.style.background = colour;
      return make("div", {}, make("span", {}, ...[swatch, name].filter((each) => each !== null)), make("b", {}, value));
    }),
  );
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const right = left + 14 + width < innerWidth ? left + 14 : left - width - 14;
  tip.style.left = `${Math.max(4, Math.min(right, innerWidth - width - 4))}px`;
  tip.style.top = `${Math.max(4, Math.min(top - 10, innerHeight - height - 4))}px`;
}

export function hideTip() {
  tip.hidden = true;
}
