"use strict";
// Keeps a study's page as it stands. Without it the page loads itself again every few seconds.
const now = document.getElementById("now");
const rows = document.getElementById("rows");
const events = new EventSource(now.dataset.events);
function add(cells) {
  const line = document.createElement("tr");
  cells.forEach((text, place) => {
    const cell = document.createElement(place ? "td" : "th");
    if (place) { cell.className = "number"; } else { cell.scope = "row"; }
    cell.textContent = text;
    line.append(cell);
  });
  return line;
}
let first = true;
events.addEventListener("rows", (event) => {
  if (first) { rows.replaceChildren(); first = false; }  // all rows come again, those that the page came with, too
  rows.append(...JSON.parse(event.data).map(add));
});
events.addEventListener("anew", () => rows.replaceChildren());
events.addEventListener("now", (event) => { now.innerHTML = JSON.parse(event.data); });
