// Shown where keys are asked for. The key goes to the proxy once, and is kept nowhere in the page.

import { post } from "./api.js";
import { h, put } from "./dom.js";
import { plain } from "./format.js";

export function loginView(main, done) {
  const field = h("input", { type: "password", id: "key", autocomplete: "off", spellcheck: "false", required: true });
  const wrong = h("p.bad", { role: "alert" });
  const form = h("form.login", {
    onsubmit: async (event) => {
      event.preventDefault();
      const key = field.value;
      field.value = "";
      try {
        await post("ui/login", { key });
        await done();
      } catch (error) {
        wrong.textContent = error.status === 403 ? "This is neither the admin key nor a viewer key." : plain(error.message);
        field.focus();
      }
    },
  },
    h("img", { src: "static/mark.svg", alt: "", width: 40, height: 40 }),
    h("h1", "Steno"),
    h("p.dim", "Recorded sessions are behind a key: the admin key, or a viewer key, which only reads."),
    h("label", { for: "key" }, "Key"), field, wrong,
    h("button.primary", { type: "submit" }, "Log in"),
    h("p.dim.small", "The browser then keeps a cookie that reads for twelve hours and that no script sees."),
  );
  put(main, form);
  field.focus();
}
