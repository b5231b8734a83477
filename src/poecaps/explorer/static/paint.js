// Pixels on canvases.

/** Show H·W·C bytes, row by row, on a canvas of H×W. */
export function paint(canvas, pixels, [channels, height, width]) {
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  canvas.getContext("2d").putImageData(toImageData(pixels, channels, height, width), 0, 0);
}

function toImageData(pixels, channels, height, width) {
  const data = new ImageData(width, height);
  for (let i = 0; i < width * height; i += 1) {
    for (let c = 0; c < 3; c += 1) data.data[4 * i + c] = pixels[channels * i + (channels === 1 ? 0 : c)];
    data.data[4 * i + 3] = 255;
  }
  return data;
}

/** Turn H·W·C bytes into a PNG. */
export function toBlob(pixels, shape) {
  const canvas = document.createElement("canvas");
  paint(canvas, pixels, shape);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

/** Read any picture that the browser can, as a PNG of at most so many pixels a side; transparent is black. */
export async function readFile(file, largest = 1024) {
  const picture = await createImageBitmap(file).catch(() => {
    throw new Error(`${file.name} is no picture that can be read.`);
  });
  const scale = Math.min(1, largest / Math.max(picture.width, picture.height));
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: Math.ceil(picture.width * scale), height: Math.ceil(picture.height * scale) });
  const context = canvas.getContext("2d");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  picture.close();
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

/** Show rows of numbers as a transparent heat map, from the least to the most of them. */
export function paintHeat(canvas, rows) {
  const [height, width] = [rows.length, rows[0].length];
  Object.assign(canvas, { width, height });
  const [least, most] = [Math.min(...rows.flat()), Math.max(...rows.flat())];
  const data = new ImageData(width, height);
  rows.flat().forEach((value, i) => {
    const share = most > least ? (value - least) / (most - least) : 0;
    data.data.set([255, 150 - 70 * share, 20, 225 * share ** 1.5], 4 * i);
  });
  canvas.getContext("2d").putImageData(data, 0, 0);
  return [least, most];
}

export function clear(canvas) {
  canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height);
}

/** Let a person draw on a canvas with mouse, pen or finger; `changed` is called after every stroke and during it. */
export class Sketch {
  #drawing = false;

  constructor(canvas, changed) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.clear();
    const point = (event) => {
      const box = canvas.getBoundingClientRect();
      return [(event.clientX - box.left) * canvas.width / box.width, (event.clientY - box.top) * canvas.height / box.height];
    };
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      event.preventDefault();
      canvas.setPointerCapture(event.pointerId);
      this.#drawing = true;
      this.context.beginPath();
      this.context.moveTo(...point(event));
      this.#to(point(event));
      changed();
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.#drawing) return;
      for (const each of event.getCoalescedEvents?.() ?? [event]) this.#to(point(each));
      changed();
    });
    for (const end of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(end, () => {
        this.#drawing = false;
      });
    }
  }

  #to([x, y]) {
    Object.assign(this.context, { lineWidth: this.canvas.width / 13, lineCap: "round", lineJoin: "round", strokeStyle: "#fff" });
    this.context.lineTo(x, y);
    this.context.stroke();
    this.context.beginPath();
    this.context.moveTo(x, y);
  }

  clear() {
    this.context.fillStyle = "#000";
    this.context.fillRect(0, 0, this.canvas.width, this.canvas.height);
  }

  /** Show a picture, as large as fits. */
  async show(blob) {
    const picture = await createImageBitmap(blob);
    const scale = Math.min(this.canvas.width / picture.width, this.canvas.height / picture.height);
    const [width, height] = [picture.width * scale, picture.height * scale];
    this.clear();
    this.context.imageSmoothingEnabled = scale < 1;
    this.context.drawImage(picture, (this.canvas.width - width) / 2, (this.canvas.height - height) / 2, width, height);
    picture.close();
  }

  toBlob() {
    return new Promise((done) => this.canvas.toBlob(done, "image/png"));
  }
}
