// Elements, made by calls. Text is set as text and nothing else: what agents wrote is never read as HTML.

const SVG = "http://www.w3.org/2000/svg";

// h("div.card", {onclick, title, dataset: {…}, style: {"--x": "1px"}}, child, …): a child is a node, a string, a list, or nothing.
export function h(what, ...rest) {
  const [name, ...classes] = what.split(".");
  return filled(document.createElement(name || "div"), classes, rest);
}

export function svg(what, ...rest) {
  const [name, ...classes] = what.split(".");
  return filled(document.createElementNS(SVG, name), classes, rest);
}

function filled(node, classes, rest) {
  if (classes.length) node.setAttribute("class", classes.join(" "));
  const [first] = rest;
  const given = first && typeof first === "object" && !Array.isArray(first) && !(first instanceof Node);
  if (given) for (const [name, value] of Object.entries(rest.shift())) set(node, name, value);
  add(node, rest);
  return node;
}

function set(node, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
  else if (name === "dataset") Object.assign(node.dataset, value);
  else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
  else if (name === "class") node.classList.add(...String(value).split(" ").filter(Boolean));
  else if (name === "value") node.value = value;
  else node.setAttribute(name, value === true ? "" : String(value));
}

export function add(node, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false || child === "") continue;
    if (Array.isArray(child)) add(node, child);
    else node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

export function put(node, ...children) {
  node.replaceChildren();
  return add(node, children);
}

// As `put`, for what is drawn again and again: what is the same stays, and with it a focus, a selection, a place in a list. Not for
// nodes that listen: those that stay listen as they did.
export function update(node, ...children) {
  settle(node, add(document.createElement("div"), children));
  return node;
}

function settle(node, wanted) {
  const all = [...wanted.childNodes];
  all.forEach((one, n) => {
    const there = node.childNodes[n];
    if (!there) node.append(one);
    else if (there.isEqualNode(one)) return;
    else if (there.nodeType === Node.TEXT_NODE && one.nodeType === Node.TEXT_NODE) there.data = one.data;
    else if (there.nodeName === one.nodeName) {
      for (const { name } of [...there.attributes]) if (!one.hasAttribute(name)) there.removeAttribute(name);
      // Not as an attribute: the page's policy refuses styles that are text.
      for (const { name, value } of one.attributes) if (name === "style") there.style.cssText = one.style.cssText; else there.setAttribute(name, value);
      settle(there, one);
    } else there.replaceWith(one);
  });
  while (node.childNodes.length > all.length) node.lastChild.remove();
}

// Tells those who do not see the page what has changed.
export function say(text) {
  document.getElementById("said").textContent = text;
}
