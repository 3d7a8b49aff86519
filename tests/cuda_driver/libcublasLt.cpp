// What the stand-in for libcublas needs of libcublasLt.
extern "C" int cublasLtStandIn() { return VERSION; }
