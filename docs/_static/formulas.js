document.addEventListener("DOMContentLoaded", () => {
  for (const formula of document.querySelectorAll(".formula")) {
    const displayMode = formula.tagName === "DIV";
    katex.render(formula.textContent, formula, { displayMode, throwOnError: false });
  }
});
