// Pictures as inputs of a model: scaled, centred and inverted, as poecaps.explorer.pictures does.

const DIGIT_BOX = 20 / 28; // share of the side that the digits of MNIST fill
const BACKGROUND = 0.15; // pixels up to this share of the brightest are background when centring
const FRAME = 3; // pixels along each side of a copy of 64×64
const PLAIN_SHARE = 0.7; // of the frame of a plain background is near its median
const PLAIN_LEVELS = 48;
const INK = 0.005; // shares of the pixels of a picture, and of its frame, that are darker
const PAPER = 0.1;

/** Draw a part of a picture, scaled to a size, and return the context. */
function scaled(picture, [left, top, width, height], [toWidth, toHeight]) {
  const context = new OffscreenCanvas(toWidth, toHeight)
    .getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, left, top, width, height, 0, 0, toWidth, toHeight);
  return context;
}

const whole = (picture) => [0, 0, picture.width, picture.height];

/** Return the brightness of the pixels of a context: rows of numbers from 0 to 255. */
function brightness(context) {
  const { width, height } = context.canvas;
  const { data } = context.getImageData(0, 0, width, height);
  return Array.from({ length: height }, (_, y) => Array.from({ length: width }, (__, x) => {
    const at = 4 * (y * width + x);
    return 0.299 * data[at] + 0.587 * data[at + 1] + 0.114 * data[at + 2];
  }));
}

const quantile = (values, share) =>
  values.toSorted((a, b) => a - b)[Math.min(values.length - 1, Math.floor(share * values.length))];
const frameOf = (rows) => rows.flatMap((row, y) => row.filter((_, x) =>
  Math.min(x, y, row.length - 1 - x, rows.length - 1 - y) < FRAME));

/** Return the brightness of a plain background, from 0 to 1, or null. */
function plainBackground(picture) {
  const frame = frameOf(brightness(scaled(picture, whole(picture), [64, 64])));
  const median = quantile(frame, 0.5);
  const near = frame.filter((value) => Math.abs(value - median) <= PLAIN_LEVELS);
  return near.length >= PLAIN_SHARE * frame.length ? median / 255 : null;
}

/** Invert the brightness of a picture; grey paper becomes black and grey ink white. */
function negative(picture, isGrey) {
  const context = scaled(picture, whole(picture), [picture.width, picture.height]);
  const image = context.getImageData(0, 0, picture.width, picture.height);
  const rows = brightness(scaled(picture, whole(picture), [64, 64]));
  const [paper, ink] = [quantile(frameOf(rows), PAPER), quantile(rows.flat(), INK)];
  const isStretched = isGrey && paper - ink >= PLAIN_LEVELS;
  image.data.forEach((value, at) => {
    if (at % 4 === 3) return;
    image.data[at] = isStretched ? 255 * (paper - value) / (paper - ink) : 255 - value;
  });
  context.putImageData(image, 0, 0);
  return context.canvas;
}

/** Scale the bright part to the box of MNIST's digits, with its centre of mass in the centre. */
function centred(picture, [width, height]) {
  const page = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  page.fillRect(0, 0, width, height);
  const rows = brightness(scaled(picture, whole(picture), [picture.width, picture.height]));
  const threshold = BACKGROUND * rows.reduce((most, row) => Math.max(most, ...row), 0);
  const isBright = (row) => row.some((value) => value > threshold);
  const [top, bottom] = [rows.findIndex(isBright), rows.findLastIndex(isBright)];
  if (top < 0) return page; // the picture is black
  const columns = rows[0].map((_, x) => rows.some((row) => row[x] > threshold));
  const [left, right] = [columns.indexOf(true), columns.lastIndexOf(true)];
  const [partWidth, partHeight] = [right - left + 1, bottom - top + 1];
  const scale = DIGIT_BOX * Math.min(width, height) / Math.max(partWidth, partHeight);
  const size = [partWidth, partHeight].map((side) => Math.max(1, Math.round(side * scale)));
  const part = scaled(picture, [left, top, partWidth, partHeight], size);
  let [mass, x, y] = [1e-9, 0, 0];
  brightness(part).forEach((row, r) => row.forEach((value, c) => {
    mass += value;
    x += value * (c + 0.5);
    y += value * (r + 0.5);
  }));
  const place = (side, own, centre) =>
    Math.min(Math.max(Math.round(side / 2 - centre), 0), side - own);
  page.drawImage(part.canvas, place(width, size[0], x / mass), place(height, size[1], y / mass));
  return page;
}

/** Return a canvas with the brightness of all pixels inverted. */
function inverse(picture) {
  const context = scaled(picture, whole(picture), [picture.width, picture.height]);
  const image = context.getImageData(0, 0, picture.width, picture.height);
  image.data.forEach((value, at) => {
    if (at % 4 !== 3) image.data[at] = 255 - value;
  });
  context.putImageData(image, 0, 0);
  return context.canvas;
}

/** Scale and centre what is not background. */
function centredInk(picture, size, isLight) {
  return isLight
    ? inverse(centred(inverse(picture), size).canvas).getContext("2d")
    : centred(picture, size);
}

/** Scale a picture to cover a size, and crop it. */
function fitted(picture, [width, height]) {
  const scale = Math.min(picture.width / width, picture.height / height);
  const [partWidth, partHeight] = [width * scale, height * scale];
  const [left, top] = [(picture.width - partWidth) / 2, (picture.height - partHeight) / 2];
  return scaled(picture, [left, top, partWidth, partHeight], [width, height]);
}

/**
 * Read a picture file as the input of a model: { pixels, inverted }, with H·W·C bytes. `invert` is
 * true, false, or "auto": if the background is the opposite of that of the model's images.
 */
export async function readPicture(blob, { image_shape: [channels, height, width], background },
  { centre, invert }) {
  let picture = await createImageBitmap(blob);
  let inverted = invert === true;
  if (invert === "auto" && background !== null) {
    const own = plainBackground(picture);
    inverted = own !== null
      && Math.abs(own - background) > Math.abs(1 - own - background) + 0.1;
  }
  if (inverted) picture = negative(picture, channels === 1);
  const size = [width, height];
  const context = centre ? centredInk(picture, size, background > 0.5) : fitted(picture, size);
  const { data } = context.getImageData(0, 0, width, height);
  const grey = brightness(context).flat();
  const pixels = Uint8ClampedArray.from({ length: height * width * channels }, (_, at) =>
    (channels === 1 ? grey[at] : data[4 * Math.floor(at / channels) + at % channels]));
  return { pixels, inverted };
}
