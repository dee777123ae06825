// Search of the docs site when it is opened from the file system. Browsers start no Worker from file://, so the script
// of the worker runs in a hidden frame instead; messages go both ways as those of a Worker do.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      this.loaded = new Promise((done) => script.addEventListener("load", done));
      script.src = new URL(url, location.href).href;
      inside.document.body.appendChild(script);
    }
    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
