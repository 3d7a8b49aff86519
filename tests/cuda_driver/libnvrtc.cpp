// NVRTC of CUDA 11.8 as the program calls it, for tests of the calls: its machine code is the header of an ELF file.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

static std::string code;

extern "C" int nvrtcCreateProgram(void** program, const char*, const char*, int, const char* const*, const char* const*) {
    return *program = (void*)8, 0;
}
extern "C" int nvrtcCompileProgram(void*, int count, const char* const* options) {
    code = std::string("\x7f" "ELF\2\1\1\x33", 8) + std::string(56, 0);
    code[20] = 118;
    for (int i = 0; i < count; i++) {
        fprintf(stderr, "stand-in NVRTC: %s\n", options[i]);
        const char* chip = strstr(options[i], "=sm_");
        if (chip) code[48] = atoi(chip + 4);
    }
    return 0;
}
extern "C" int nvrtcGetCUBINSize(void*, size_t* size) { return *size = code.size(), 0; }
extern "C" int nvrtcGetCUBIN(void*, char* out) { return memcpy(out, code.data(), code.size()), 0; }
extern "C" int nvrtcGetProgramLogSize(void*, size_t* size) { return *size = 1, 0; }
extern "C" int nvrtcGetProgramLog(void*, char* out) { return *out = 0, 0; }
extern "C" int nvrtcDestroyProgram(void**) { return 0; }
