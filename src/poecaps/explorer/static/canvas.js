// Pixels on canvases.

/** Draw H·W·C bytes, row by row, on a canvas of H×W. */
export function drawPixels(canvas, pixels, [channels, height, width]) {
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  canvas.getContext("2d").putImageData(toImageData(pixels, channels, height, width), 0, 0);
  canvas.classList.add("drawn");
}

function toImageData(pixels, channels, height, width) {
  const data = new ImageData(width, height);
  for (let i = 0; i < width * height; i += 1) {
    for (let c = 0; c < 3; c += 1) {
      data.data[4 * i + c] = pixels[channels * i + (channels === 1 ? 0 : c)];
    }
    data.data[4 * i + 3] = 255;
  }
  return data;
}

const canvasToPng = (canvas) => new Promise((done) => canvas.toBlob(done, "image/png"));

/** Convert H·W·C bytes to a PNG. */
export function toPng(pixels, shape) {
  const canvas = document.createElement("canvas");
  drawPixels(canvas, pixels, shape);
  return canvasToPng(canvas);
}

/**
 * Convert any picture that the browser can read to a PNG of limited size. What is transparent
 * becomes white if the rest is dark, and black otherwise.
 */
export async function readPicture(file, maxSide = 1024) {
  const picture = await createImageBitmap(file).catch(() => {
    throw new Error(`Cannot read ${file.name}: not a valid image.`);
  });
  const scale = Math.min(1, maxSide / Math.max(picture.width, picture.height));
  const canvas = document.createElement("canvas");
  Object.assign(canvas, {
    width: Math.ceil(picture.width * scale),
    height: Math.ceil(picture.height * scale),
  });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  picture.close();
  context.globalCompositeOperation = "destination-over"; // behind the picture
  context.fillStyle = isDark(context) ? "#fff" : "#000";
  context.fillRect(0, 0, canvas.width, canvas.height);
  return canvasToPng(canvas);
}

/** Return whether the opaque part of a picture is dark. */
function isDark(context) {
  const { data } = context.getImageData(0, 0, context.canvas.width, context.canvas.height);
  let [light, opaque] = [0, 0];
  for (let i = 0; i < data.length; i += 4) {
    light += data[i + 3] * (data[i] + data[i + 1] + data[i + 2]) / 3;
    opaque += data[i + 3];
  }
  return light < 127 * opaque;
}

/** Draw rows of numbers as a transparent heat map. */
export function drawHeatMap(canvas, rows) {
  const [height, width] = [rows.length, rows[0].length];
  Object.assign(canvas, { width, height });
  const [least, greatest] = [Math.min(...rows.flat()), Math.max(...rows.flat())];
  const data = new ImageData(width, height);
  rows.flat().forEach((value, i) => {
    const share = greatest > least ? (value - least) / (greatest - least) : 0;
    data.data.set([255, 150 - 70 * share, 20, 225 * share ** 1.5], 4 * i);
  });
  canvas.getContext("2d").putImageData(data, 0, 0);
}

export function clear(canvas) {
  canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height);
  canvas.classList.remove("drawn");
}

/** Return whether most pixels along the sides of a part of a canvas are light. */
function isLightAtSides(context, [left, top, width, height]) {
  const { data } = context.getImageData(left, top, width, height);
  const across = Math.max(1, width - 1); // from the left side to the right one
  let balance = 0;
  for (let y = 0; y < height; y += 1) {
    for (let x = 0; x < width; x += y % (height - 1) ? across : 1) {
      const at = 4 * (y * width + x);
      balance += data[at] + data[at + 1] + data[at + 2] > 3 * 127 ? 1 : -1;
    }
  }
  return balance > 0;
}

const PEN_STEP = 10; // of the canvas's 280 pixels
const FINE_PEN_STEP = 3; // with Shift
const PEN_KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/**
 * A canvas to draw on with mouse, pen, finger or keys; `onChange` is called during every stroke,
 * `onClear` when the Delete key is pressed, and `onPen(isDown)` when keys move the pen up or down.
 */
export class Sketch {
  #drawing = false;
  #at; // of the pen that keys move
  #isPenDown = false;
  isLight = false; // whether the paper is light, and the pen dark

  constructor(canvas, { onChange, onClear, onPen }) {
    this.canvas = canvas;
    this.pen = canvas.parentElement.querySelector("#pen");
    this.context = canvas.getContext("2d");
    this.#at = [canvas.width / 2, canvas.height / 4];
    this.onPen = onPen;
    this.clear();
    const position = (event) => {
      const box = canvas.getBoundingClientRect();
      return [
        (event.clientX - box.left) * canvas.width / box.width,
        (event.clientY - box.top) * canvas.height / box.height,
      ];
    };
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      event.preventDefault();
      canvas.setPointerCapture(event.pointerId);
      this.#drawing = true;
      this.#start(position(event));
      onChange();
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.#drawing) return;
      for (const each of event.getCoalescedEvents?.() ?? [event]) this.#lineTo(position(each));
      onChange();
    });
    for (const end of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(end, () => {
        this.#drawing = false;
      });
    }
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key in PEN_KEYS) this.#move(event, onChange);
      else if (event.key === " ") {
        this.#setPen(!this.#isPenDown);
        if (this.#isPenDown) this.#start(this.#at);
        if (this.#isPenDown) onChange();
      } else if (event.key === "Delete" || event.key === "Backspace") onClear();
      else return;
      event.preventDefault();
    });
    canvas.addEventListener("blur", () => this.#isPenDown && this.#setPen(false));
    this.#showPen();
  }

  #move(event, onChange) {
    const step = event.shiftKey ? FINE_PEN_STEP : PEN_STEP;
    const size = [this.canvas.width, this.canvas.height];
    this.#at = this.#at.map((value, axis) =>
      Math.min(Math.max(value + step * PEN_KEYS[event.key][axis], 0), size[axis]));
    this.#showPen();
    if (!this.#isPenDown) return;
    this.#lineTo(this.#at);
    onChange();
  }

  #setPen(isDown) {
    this.#isPenDown = isDown;
    this.#showPen();
    this.onPen(isDown);
  }

  #showPen() {
    this.pen.style.left = `${100 * this.#at[0] / this.canvas.width}%`;
    this.pen.style.top = `${100 * this.#at[1] / this.canvas.height}%`;
    this.pen.classList.toggle("down", this.#isPenDown);
  }

  #start(at) {
    this.context.beginPath();
    this.context.moveTo(...at);
    this.#lineTo(at);
  }

  #lineTo([x, y]) {
    Object.assign(this.context, {
      lineWidth: this.canvas.width / 13,
      lineCap: "round",
      lineJoin: "round",
      strokeStyle: this.isLight ? "#000" : "#fff",
    });
    this.context.lineTo(x, y);
    this.context.stroke();
    this.context.beginPath();
    this.context.moveTo(x, y);
  }

  clear(isLight = this.isLight) {
    this.isLight = isLight;
    this.context.fillStyle = isLight ? "#fff" : "#000";
    this.context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    this.canvas.classList.add("drawn");
  }

  /** Show a picture, as large as fits. A pen on light paper is dark from then on. */
  async show(blob) {
    const picture = await createImageBitmap(blob);
    const { width, height } = this.canvas;
    const scale = Math.min(width / picture.width, height / picture.height);
    const [shownWidth, shownHeight] = [picture.width * scale, picture.height * scale];
    this.clear();
    this.context.imageSmoothingEnabled = scale < 1;
    const [left, top] = [(width - shownWidth) / 2, (height - shownHeight) / 2];
    const part = [Math.floor(left), Math.floor(top), Math.ceil(shownWidth), Math.ceil(shownHeight)];
    this.context.drawImage(picture, left, top, shownWidth, shownHeight);
    picture.close();
    this.isLight = isLightAtSides(this.context, part);
  }

  toPng() {
    return canvasToPng(this.canvas);
  }
}
