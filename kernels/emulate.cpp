// The emulated device: a program that executes requests from stdin and answers on stdout. Numbers are little-endian
// u64. It ends with its input; a faulty kernel ends it with a message on stderr.
#include "kvsmith.cu"

static uint64_t number() {
    uint64_t v;
    if (fread(&v, 8, 1, stdin) != 1) exit(0);
    return v;
}

static void bytes(void* to, size_t size) {
    if (fread(to, 1, size, stdin) != size) exit(0);
}

static void answer(uint64_t v) { fwrite(&v, 8, 1, stdout); }

// Lists the kernels, one per line: name, threads, most bytes of dynamic shared memory, bytes of each argument.
static void list() {
    std::string text;
    for (auto& [name, kernel] : emulate::kernels()) {
        text += name + " " + std::to_string(kernel.threads) + " " + std::to_string(kernel.most_shared);
        for (size_t size : kernel.sizes) text += " " + std::to_string(size);
        text += "\n";
    }
    answer(text.size());
    fwrite(text.data(), 1, text.size(), stdout);
}

static std::string text() {
    std::string text(number(), ' ');
    bytes(text.data(), text.size());
    return text;
}

static void launch() {
    std::string name = text();
    Dim grid;
    grid.x = (unsigned)number(), grid.y = (unsigned)number(), grid.z = (unsigned)number();
    unsigned block = (unsigned)number();
    size_t shared = number();
    std::vector<uint64_t> arguments(number());
    std::vector<size_t> sizes;
    for (auto& argument : arguments) {
        sizes.push_back(number());
        argument = number();
    }
    emulate::launch(name, grid, block, shared, arguments, sizes);
}

int main() {
    for (;;) {
        char what = (char)number();
        if (what == 'a') {
            size_t size = number();
            answer((uint64_t)memset(malloc(size), 0xff, size));
        } else if (what == 'f') {
            free((void*)number());
            answer(0);
        } else if (what == 'w') {
            void* to = (void*)number();
            size_t size = number();
            std::vector<char> data(size);
            bytes(data.data(), size);
            memcpy(to, data.data(), size);
            answer(0);
        } else if (what == 'r') {
            void* from = (void*)number();
            size_t size = number();
            std::vector<char> data(size);
            memcpy(data.data(), from, size);
            fwrite(data.data(), 1, size, stdout);
        } else if (what == 's') {
            void* at = (void*)number();
            int byte = (int)number();
            memset(at, byte, number());
            answer(0);
        } else if (what == 'l') {
            launch();
            answer(0);
        } else if (what == 'b') {
            emulate::wrong_kernel = text();
            emulate::first_is_missing = number() != 0;
            answer(0);
        } else if (what == 'k') {
            list();
        } else {
            emulate::fail("no such request");
        }
        fflush(stdout);
    }
}
