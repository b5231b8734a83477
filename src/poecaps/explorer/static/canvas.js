// Pixels on canvases.

/** Draw H·W·C bytes, row by row, on a canvas of H×W. */
export function drawPixels(canvas, pixels, [channels, height, width]) {
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  canvas.getContext("2d").putImageData(toImageData(pixels, channels, height, width), 0, 0);
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

/** Convert any picture that the browser can read to a PNG of limited size, on black. */
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
  const context = canvas.getContext("2d");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  picture.close();
  return canvasToPng(canvas);
}

/** Draw rows of numbers as a transparent heat map, and return the least and the greatest. */
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
  return [least, greatest];
}

export function clear(canvas) {
  canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height);
}

/** A canvas to draw on with mouse, pen or finger; `onChange` is called during every stroke. */
export class Sketch {
  #drawing = false;

  constructor(canvas, onChange) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
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
      this.context.beginPath();
      this.context.moveTo(...position(event));
      this.#lineTo(position(event));
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
  }

  #lineTo([x, y]) {
    Object.assign(this.context, {
      lineWidth: this.canvas.width / 13,
      lineCap: "round",
      lineJoin: "round",
      strokeStyle: "#fff",
    });
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
    const { width, height } = this.canvas;
    const scale = Math.min(width / picture.width, height / picture.height);
    const [shownWidth, shownHeight] = [picture.width * scale, picture.height * scale];
    this.clear();
    this.context.imageSmoothingEnabled = scale < 1;
    const [left, top] = [(width - shownWidth) / 2, (height - shownHeight) / 2];
    this.context.drawImage(picture, left, top, shownWidth, shownHeight);
    picture.close();
  }

  toPng() {
    return canvasToPng(this.canvas);
  }
}
