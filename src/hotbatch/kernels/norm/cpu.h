// RMS norm; see args.h.

// 1 / rms of R rows. Each sum is a chain of additions: several at once hide what one waits for.
template <int R>
inline void norm_scales(const NormArgs& args, int row, float* scales) {
  const float* x = args.input + row * args.input_stride;
  const int cols = args.output->cols;
  vf squares[R];
  HB_UNROLL for (auto& square : squares) square = zero();
  for (int k = 0; k < cols; k += kLanes) {
    HB_UNROLL for (int r = 0; r < R; ++r) {
      const vf value = load_columns(x + r * args.input_stride + k, cols - k);
      squares[r] = fma(value, value, squares[r]);
    }
  }
  for (int r = 0; r < R; ++r) {
    const float mean = sum(squares[r]) / static_cast<float>(cols);
    scales[r] = 1.0f / std::sqrt(mean + args.eps);
  }
}

inline void norm_rows(const NormArgs& args, int begin, int end) {
  constexpr int kTogether = 16;
  const int cols = args.output->cols;
  for (; begin < end; begin += kTogether) {
    const int stop = std::min(end, begin + kTogether);
    float scales[kTogether];
    int row = begin;
    for (; row + 4 <= stop; row += 4) norm_scales<4>(args, row, scales + (row - begin));
    for (; row < stop; ++row) norm_scales<1>(args, row, scales + (row - begin));
    write_rows(*args.output, begin, stop, 0, cols, [&](int r, int k) {
      const vf x = load_columns(args.input + r * args.input_stride + k, cols - k);
      return x * set1(scales[r - begin]) * load_columns(args.weight + k, cols - k);
    });
  }
}
