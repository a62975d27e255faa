// The theme is set before anything is painted, so this is no module and stands in the head. The
// sheet knows two themes; which of them "auto" is, is the system's to say, now and when it changes.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  let choice = "auto";
  try { choice = localStorage.getItem("hotbatch.theme") ?? choice; } catch { /* not allowed to keep any */ }
  if (choice !== "light" && choice !== "dark") choice = "auto";
  const apply = () => { root.dataset.theme = choice === "auto" ? (dark.matches ? "dark" : "light") : choice; };
  dark.addEventListener("change", apply);
  apply();
  window.hotbatchTheme = {
    get choice() { return choice; },
    choose(next) {
      choice = next;
      apply();
      try { localStorage.setItem("hotbatch.theme", next); } catch { /* for this page view only */ }
    },
  };
})();
