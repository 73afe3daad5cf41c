// One round as a picture: the tree from left to right, siblings in draw order, the accepted path and the bonus token marked.

const SVG = "http://www.w3.org/2000/svg";
const ROW = 26, CHAR = 7.3, GAP = 34, PAD = 6, MOST = 14;

export function drawRound(round, rootText) {
  const nodes = [{ text: rootText, parent: -1, kind: "root" }];
  const path = new Set(round.path);
  round.nodes.forEach((node, i) => nodes.push({ text: node.token, parent: node.parent, kind: path.has(i + 1) ? "taken" : "" }));
  const stop = round.path.length ? round.path[round.path.length - 1] : 0;
  if (round.tokens.length > round.path.length)
    nodes.push({ text: round.tokens[round.tokens.length - 1], parent: stop, kind: "bonus" });
  place(nodes);
  const svg = element("svg", { role: "presentation", width: 1 + Math.max(...nodes.map((n) => n.x + n.width)), height: ROW * (1 + Math.max(...nodes.map((n) => n.row))) });
  for (const node of nodes) if (node.parent >= 0) svg.append(edge(nodes[node.parent], node));
  for (const node of nodes) svg.append(box(node));
  return svg;
}

export function visible(text) {
  const shown = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·");
  return shown.length > MOST ? shown.slice(0, MOST - 1) + "…" : shown;
}

// Depth gives the column, the order of the leaves the row; an inner node stands beside its first child.
function place(nodes) {
  const children = nodes.map(() => []);
  nodes.forEach((node, i) => { if (node.parent >= 0) children[node.parent].push(i); });
  let row = 0;
  const depths = [];
  const visit = (i, depth) => {
    const node = nodes[i];
    node.label = visible(node.text);
    node.width = CHAR * Math.max(1, node.label.length) + 2 * PAD;
    node.depth = depth;
    depths[depth] = Math.max(depths[depth] || 0, node.width);
    if (!children[i].length) { node.row = row++; return; }
    for (const child of children[i]) visit(child, depth + 1);
    node.row = nodes[children[i][0]].row;
  };
  visit(0, 0);
  const lefts = [];
  depths.reduce((x, width) => (lefts.push(x), x + width + GAP), 0);
  for (const node of nodes) node.x = lefts[node.depth];
}

function edge(from, to) {
  const x0 = from.x + from.width, y0 = ROW * (from.row + 0.5), x1 = to.x, y1 = ROW * (to.row + 0.5), half = (x0 + x1) / 2;
  return element("path", { class: to.kind ? "edge taken" : "edge", d: `M${x0} ${y0}C${half} ${y0} ${half} ${y1} ${x1} ${y1}` });
}

function box(node) {
  const group = element("g", { class: node.kind });
  const text = element("text", { x: node.x + PAD, y: ROW * (node.row + 0.5) + 4 });
  text.textContent = node.label;
  group.append(element("rect", { class: "box", x: node.x + 0.5, y: ROW * node.row + 3, width: node.width, height: ROW - 6, rx: 5 }), text);
  return group;
}

function element(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
