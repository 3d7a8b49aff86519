// NVRTC as the program calls it, for tests of the calls: its machine code is an empty ELF file.
#include <cstdio>
#include <cstring>

extern "C" int nvrtcCreateProgram(void** program, const char*, const char*, int, const char* const*, const char* const*) {
    return *program = (void*)8, 0;
}
extern "C" int nvrtcCompileProgram(void*, int count, const char* const* options) {
    for (int i = 0; i < count; i++) fprintf(stderr, "stand-in NVRTC: %s\n", options[i]);
    return 0;
}
extern "C" int nvrtcGetCUBINSize(void*, size_t* size) { return *size = 16, 0; }
extern "C" int nvrtcGetCUBIN(void*, char* out) { return memcpy(out, "\x7f" "ELF\0\0\0\0\0\0\0\0\0\0\0", 16), 0; }
extern "C" int nvrtcGetProgramLogSize(void*, size_t* size) { return *size = 1, 0; }
extern "C" int nvrtcGetProgramLog(void*, char* out) { return *out = 0, 0; }
extern "C" int nvrtcDestroyProgram(void**) { return 0; }
