// Browsers refuse a Worker to pages from file://, where the search runs in a hidden frame instead. The theme would load
// a script for that from another host, unless one is named that has "iframe-worker" in its path.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.scope = this.load(url);
    }

    async load(url) {
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const scope = frame.contentWindow;
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = scope.document.createElement("script");
      script.src = new URL(url, location.href).href;
      const loaded = new Promise((resolve) => script.addEventListener("load", resolve));
      scope.document.body.append(script);
      await loaded;
      return scope;
    }

    async postMessage(data) {
      const scope = await this.scope;
      scope.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
