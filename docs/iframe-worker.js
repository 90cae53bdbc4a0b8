// The site's search finds only pages with every word of a question, and knows no frequent words. This worker leaves out
// frequent words, and asks for fewer and fewer of the words until a page has them.
{
const frequent = new Set((
  "a about an and any are as at be by can could did do does for from get has have how i if in is it its me must my of on or " +
  "our out should so than that the their them then there this to use was we what when where which who why will with you"
).split(" "));
const most = 7; // words of a question; the number of their combinations doubles with each

// All choices of a number of words.
const choices = (words, number) =>
  number === 0 ? [[]] : words.flatMap((word, at) => choices(words.slice(at + 1), number - 1).map((rest) => [word, ...rest]));

// The search's own form of a query: pages with at least this number of the words.
const query = (words, number) => ({
  type: "operator",
  data: {
    operator: "or",
    operands: choices(words, number).map((chosen) => ({
      type: "operator",
      data: { operator: "and", operands: chosen.map((word) => ({ type: "value", data: value(word) })) },
    })),
  },
});
const value = ({ word, index, start, end }) => ({
  field: "*", value: { type: "prefix", data: word }, range: { start, end, value: index },
});

const wordsOf = (text) => {
  const found = [...text.matchAll(/[^\s\-_,:!?=\[\]()\\"`\/]+/g)].map((match, index) => ({
    word: match[0].replace(/\.$/, ""), index, start: match.index, end: match.index + match[0].length,
  }));
  const rare = found.filter(({ word }) => word && !frequent.has(word.toLowerCase()));
  return (rare.length ? rare : found).slice(0, most);
};

// Browsers start no worker from a folder (file:). The site's search then runs in a frame, which has the page's own origin.
class Frame {
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
}

const Inner = location.protocol === "file:" ? Frame : Worker;
const [QUERY, RESULT] = [2, 3]; // types of the worker's messages

window.Worker = class {
  constructor(address) {
    this.inner = new Inner(address);
    this.waiting = 0; // number of queries that have no result yet
    this.inner.onerror = (error) => this.onerror && this.onerror(error);
    this.inner.onmessage = (message) => this.receive(message);
  }
  postMessage(message) {
    if (message.type !== QUERY || typeof message.data.input !== "string" || !message.data.input.trim()) {
      this.inner.postMessage(message);
      return;
    }
    this.message = message;
    this.words = wordsOf(message.data.input);
    this.number = this.words.length;
    this.ask();
  }
  ask() {
    this.waiting += 1;
    this.inner.postMessage({ ...this.message, data: { ...this.message.data, input: query(this.words, this.number) } });
  }
  receive(message) {
    if (message.data.type === RESULT && this.waiting) {
      this.waiting -= 1;
      if (!this.waiting && !message.data.data.items.length && this.number > 1) {
        this.number -= 1;
        this.ask();
        return;
      }
    }
    if (this.onmessage) this.onmessage(message);
  }
  terminate() {
    this.inner.terminate();
  }
};
}
