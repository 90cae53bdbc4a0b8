"use strict";
// Keeps a study's page up to date. Without it the page loads itself again every few seconds.
setInterval(async () => {
  const reply = await fetch(location.href).catch(() => null);
  if (!reply || !reply.ok) { return; }
  const page = new DOMParser().parseFromString(await reply.text(), "text/html");
  for (const id of ["now", "rows"]) {
    const [old, fresh] = [document, page].map((each) => each.getElementById(id));
    if (fresh && old.innerHTML !== fresh.innerHTML) { old.innerHTML = fresh.innerHTML; }
  }
}, 1000);
