for (const button of document.querySelectorAll("thead button")) button.onclick = () => {
  const head = button.parentNode, row = head.parentNode, table = head.closest("table");
  const column = [...row.children].indexOf(head), text = head.classList.contains("t");
  const up = head.ariaSort ? head.ariaSort === "descending" : text;
  for (const other of row.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = line => text ? line.children[column].textContent : Number(line.children[column].dataset.v);
  const order = (a, b) => text ? value(a).localeCompare(value(b)) : value(a) - value(b) || 0;
  for (const body of table.tBodies) {
    const lines = [...body.rows].filter(line => !line.className);
    body.append(...lines.sort((a, b) => up ? order(a, b) : order(b, a)));
    body.append(...[...body.rows].filter(line => line.className === "total"));
  }
};
