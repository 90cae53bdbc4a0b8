// Browsers start no worker from a folder (file:). The site's search then runs in a frame, which has the page's own origin.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(address) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.onmessage && this.onmessage({ data });
      this.ready = new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        script.src = address;
        script.onload = done;
        script.onerror = failed;
        inside.document.head.append(script);
      });
      this.ready.catch((error) => this.onerror && this.onerror(error));
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })), () => {});
    }
    terminate() {
      this.frame.remove();
    }
  };
}
