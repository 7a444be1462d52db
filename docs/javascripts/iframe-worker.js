// Search runs in a worker, and a browser starts none for a page from the file system: there a hidden frame does the work.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.queue = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = `<script>
        self.postMessage = data => parent.postMessage(data, "*");
        self.importScripts = (...urls) => Promise.all(urls.map(url => new Promise((done, failed) => {
          const script = document.createElement("script");
          Object.assign(script, {src: url, onload: done, onerror: failed});
          document.head.append(script);
        })));
      <\/script><script src="${new URL(url, location)}"><\/script>`;
      this.frame.onload = () => {
        this.loaded = true;
        this.queue.forEach(data => this.postMessage(data));
      };
      window.addEventListener("message", event => {
        if (event.source === this.frame.contentWindow) {
          this.dispatchEvent(new MessageEvent("message", {data: event.data}));
        }
      });
      document.body.append(this.frame);
    }

    postMessage(data) {
      if (this.loaded) this.frame.contentWindow.postMessage(data, "*");
      else this.queue.push(data);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
