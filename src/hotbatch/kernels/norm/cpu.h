// RMS norm; see args.h.

// 1 / rms of a row.
inline float norm_scale(const NormArgs& args, int row) {
  const float* x = args.input + row * args.input_stride;
  const int cols = args.output->cols;
  vf squares = zero();
  for (int k = 0; k < cols; k += kLanes) {
    const vf value = load_columns(x + k, cols - k);
    squares = fma(value, value, squares);
  }
  const float mean = sum(squares) / static_cast<float>(cols);
  return 1.0f / std::sqrt(mean + args.eps);
}

inline void norm_rows(const NormArgs& args, int begin, int end) {
  constexpr int kTogether = 16;
  const int cols = args.output->cols;
  for (; begin < end; begin += kTogether) {
    const int stop = std::min(end, begin + kTogether);
    float scales[kTogether];
    for (int row = begin; row < stop; ++row) scales[row - begin] = norm_scale(args, row);
    write_rows(*args.output, begin, stop, 0, cols, [&](int row, int k) {
      const vf x = load_columns(args.input + row * args.input_stride + k, cols - k);
      return x * set1(scales[row - begin]) * load_columns(args.weight + k, cols - k);
    });
  }
}
