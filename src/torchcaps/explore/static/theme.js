// Runs before the first paint: takes the theme that was chosen last; without one, the system's.
{
  let chosen = null;
  try {
    chosen = localStorage.getItem("torchcaps-theme");
  } catch {
    // storage may be switched off; the system's theme is kept
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
