// One row of SiLU(gate) * up, or of a plain conversion; see args.h.

inline void silu_mul_row(const SiluMulArgs& args, int row) {
  const float* gate = args.input + row * args.input_stride;
  const int cols = args.output->cols;
  const float* up = gate + cols;
  write_activation(*args.output, row, [&](int k) {
    const vf g = load_columns(gate + k, cols - k);
    const vf sigmoid = set1(1.0f) / (set1(1.0f) + exp(zero() - g));
    return g * sigmoid * load_columns(up + k, cols - k);
  });
}

inline void convert_row(const ConvertArgs& args, int row) {
  const float* x = args.input + row * args.input_stride;
  const int cols = args.output->cols;
  write_activation(*args.output, row, [&](int k) { return load_columns(x + k, cols - k); });
}
