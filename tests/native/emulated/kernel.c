// What the program of ../program.cpp needs of Linux, on a bare emulated machine: memory, a stdin, a stdout, an end.
//
// Everything runs in ring 0, one thread, no interrupts. ../emulator.py writes the disk this starts from and reads what it leaves there.
#include "mend.h"

#define PROGRAM 0x400000ull // the program's parts, then its heap, up to its stdout
#define OUTPUT 0x4000000ull
#define INPUT 0x8000000ull
#define PAGES 0x10000000ull // the memory behind MAPS
#define PAGES_END 0x30000000ull
#define MAPS 0x40000000ull
#define SECTOR 512

// The disk's first sector; then the program and its stdin, whole sectors, then room for its stdout.
static struct Boot {
    uint64_t entry, stack, heap;      // where the program starts, its stack and heap
    uint64_t program, input, output;  // bytes: from PROGRAM on, of stdin, of the room for stdout
    uint64_t rest[58];
} boot;

static uint64_t heap, taken, written, mapped;
static uint64_t root[512] __attribute__((aligned(4096))), gigabytes[512] __attribute__((aligned(4096)));
static uint64_t low[512] __attribute__((aligned(4096))), lowest[512] __attribute__((aligned(4096)));
static uint64_t maps[512] __attribute__((aligned(4096)));
static uint64_t pages[(PAGES_END - PAGES) / 4096] __attribute__((aligned(4096)));

static void out8(uint16_t port, uint8_t v) { __asm__ volatile("outb %0, %1" ::"a"(v), "d"(port)); }
static uint8_t in8(uint16_t port) {
    uint8_t v;
    __asm__ volatile("inb %1, %0" : "=a"(v) : "d"(port));
    return v;
}
static void say(const char* text, uint64_t n) { // to Bochs's own stdout
    for (uint64_t i = 0; i < n; i++) out8(0xe9, (uint8_t)text[i]);
}
static void say_number(const char* name, uint64_t n) {
    char digits[] = " 0x0000000000000000; ";
    for (int i = 18; i > 2; i--, n >>= 4) digits[i] = "0123456789abcdef"[n & 15];
    for (; *name; name++) out8(0xe9, (uint8_t)*name);
    say(digits, sizeof digits - 1);
}

enum { DISK = 0x1f0, READ_SECTORS = 0x20, WRITE_SECTORS = 0x30, MORE = 0x08, BUSY = 0x80 };
static void disk(uint8_t command, void* data, uint64_t sector, uint64_t bytes) {
    for (uint64_t left = (bytes + SECTOR - 1) / SECTOR; left; sector += 256) {
        const uint64_t n = left < 256 ? left : 256;
        out8(DISK + 6, (uint8_t)(0xe0 | sector >> 24)), out8(DISK + 2, (uint8_t)n);
        out8(DISK + 3, (uint8_t)sector), out8(DISK + 4, (uint8_t)(sector >> 8)), out8(DISK + 5, (uint8_t)(sector >> 16));
        out8(DISK + 7, command);
        for (uint64_t i = 0; i < n; i++) {
            uint64_t words = SECTOR / 2;
            while ((in8(DISK + 7) & (BUSY | MORE)) != MORE) {}
            if (command == READ_SECTORS)
                __asm__ volatile("rep insw" : "+D"(data), "+c"(words) : "d"(DISK) : "memory");
            else
                __asm__ volatile("rep outsw" : "+S"(data), "+c"(words) : "d"(DISK) : "memory");
        }
        while (in8(DISK + 7) & BUSY) {}
        left -= n;
    }
}

_Noreturn static void end(uint64_t status) {
    const uint64_t sectors[] = {1, (boot.program + SECTOR - 1) / SECTOR, (boot.input + SECTOR - 1) / SECTOR};
    disk(WRITE_SECTORS, (void*)OUTPUT, sectors[0] + sectors[1] + sectors[2], written);
    say_number("output", written), say_number("status", status);
    for (const char* c = "Shutdown";; c = *c ? c + 1 : c) out8(0x8900, (uint8_t)*c); // Bochs ends
}

enum { FAULT = 1000 };
// What `faults` of start.S leaves: registers by their numbers, then what the processor pushed.
struct Frame {
    uint64_t regs[16], vector, error, rip, cs, flags, rsp, ss;
};
__attribute__((used)) void fault(struct Frame* f) {
    f->regs[4] = f->rsp;
    if (f->vector == 6 && mend(f->regs, &f->rip)) return;
    uint64_t address;
    __asm__ volatile("movq %%cr2, %0" : "=r"(address));
    say_number("exception", f->vector), say_number("error code", f->error), say_number("at", f->rip), say_number("address", address);
    end(FAULT);
}

static void present(uint64_t address, uint64_t length, int yes) { // whole pages of MAPS
    for (uint64_t p = (address - MAPS) / 4096; p < (address - MAPS + length + 4095) / 4096; p++) {
        pages[p] = yes ? (PAGES + p * 4096) | 3 : 0;
        __asm__ volatile("invlpg (%0)" ::"r"(MAPS + p * 4096) : "memory");
    }
}

static void copy(void* to, const void* from, uint64_t n) { __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(n)::"memory"); }

static int64_t write_out(uint64_t fd, const char* from, uint64_t n) {
    if (fd != 1)
        say(from, n);
    else if (written + n > boot.output)
        return -28; // ENOSPC
    else
        copy((void*)(OUTPUT + written), from, n), written += n;
    return (int64_t)n;
}

// Linux's numbers. a: the number and its arguments, each where x86-64 has it: rax, rdi, rsi, rdx, r10, r8, r9.
enum { READ = 0, WRITE = 1, FSTAT = 5, MMAP = 9, MPROTECT = 10, MUNMAP = 11, BRK = 12, WRITEV = 20, MADVISE = 28, GETPID = 39, EXIT = 60,
       ARCH_PRCTL = 158, GETTID = 186, FUTEX = 202, SCHED_GETAFFINITY = 204, SET_TID_ADDRESS = 218, EXIT_GROUP = 231, TGKILL = 234 };
enum { ARCH_SET_FS = 0x1002, ARCH_REQ_XCOMP_PERM = 0x1023, ENOSYS = 38, ENOMEM = 12, EINVAL = 22, S_IFIFO = 0010600 };

__attribute__((used)) int64_t serve(const uint64_t* a) {
    const uint64_t length = (a[2] + 4095) & ~4095ull;
    switch (a[0]) {
    case READ: {
        const uint64_t left = boot.input - taken, n = a[3] < left ? a[3] : left;
        copy((void*)a[2], (const void*)(INPUT + taken), n), taken += n;
        return (int64_t)n;
    }
    case WRITE: return write_out(a[1], (const char*)a[2], a[3]);
    case WRITEV: {
        int64_t sum = 0;
        for (const uint64_t *part = (const uint64_t*)a[2], *last = part + 2 * a[3]; part < last; part += 2)
            sum += write_out(a[1], (const char*)part[0], part[1]);
        return sum;
    }
    case MMAP: // anonymous, never where asked, a hole of a page behind each
        if (mapped + length + 4096 > PAGES_END - PAGES) return -ENOMEM;
        mapped += length + 4096;
        present(MAPS + mapped - length - 4096, length, a[3] != 0);
        return (int64_t)(MAPS + mapped - length - 4096);
    case MUNMAP: // not given out again: what is used later faults
    case MPROTECT:
        if (a[1] >= MAPS) present(a[1], length, a[0] == MPROTECT && a[3] != 0);
        return 0;
    case BRK:
        if (a[1] >= boot.heap && a[1] <= OUTPUT) heap = a[1];
        return (int64_t)heap;
    case ARCH_PRCTL:
        if (a[1] == ARCH_SET_FS) __asm__ volatile("wrmsr" ::"c"(0xc0000100), "a"((uint32_t)a[2]), "d"((uint32_t)(a[2] >> 32)));
        return a[1] == ARCH_SET_FS || a[1] == ARCH_REQ_XCOMP_PERM ? 0 : -EINVAL;
    case SCHED_GETAFFINITY: *(uint64_t*)a[3] = 1; return 8;
    case FSTAT:
        for (int i = 0; i < 18; i++) ((uint64_t*)a[2])[i] = 0;
        ((uint32_t*)a[2])[6] = S_IFIFO;
        return 0;
    case GETPID: case GETTID: case SET_TID_ADDRESS: return 1;
    case MADVISE: case FUTEX: return 0;
    case EXIT: case EXIT_GROUP: end(a[1] & 255);
    case TGKILL: say_number("signal", a[3]); end(FAULT);
    default: return -ENOSYS;
    }
}

static void set_msr(uint32_t msr, uint64_t v) { __asm__ volatile("wrmsr" ::"c"(msr), "a"((uint32_t)v), "d"((uint32_t)(v >> 32))); }

static void set_faults(void) { // on a stack of their own: the program's has a red zone
    extern char faults[];
    static char fault_stack[16384] __attribute__((aligned(64)));
    static uint32_t tss[26];
    static uint64_t idt[64], gdt[5];
    const struct __attribute__((packed)) Table {
        uint16_t limit;
        uint64_t base;
    } idtr = {sizeof idt - 1, (uint64_t)idt}, gdtr = {sizeof gdt - 1, (uint64_t)gdt};
    for (int i = 0; i < 32; i++) {
        const uint64_t at = (uint64_t)faults + 16 * i;
        idt[2 * i] = (at & 0xffff) | 8 << 16 | 0x8e01ull << 32 | (at >> 16 & 0xffff) << 48;
    }
    tss[9] = (uint32_t)(uint64_t)(fault_stack + sizeof fault_stack);
    gdt[1] = 0x00af9b000000ffff, gdt[2] = 0x00cf93000000ffff;
    gdt[3] = (sizeof tss - 1) | ((uint64_t)tss & 0xffffff) << 16 | 0x89ull << 40 | ((uint64_t)tss >> 24 & 0xff) << 56;
    __asm__ volatile("lidt %0\n lgdt %1\n ltr %w2" ::"m"(idtr), "m"(gdtr), "r"(24));
}

static void set_tables(void) { // the first GiB as it is but for its first page; the second in pages that come and go
    root[0] = (uint64_t)gigabytes | 3;
    gigabytes[0] = (uint64_t)low | 3, gigabytes[1] = (uint64_t)maps | 3;
    low[0] = (uint64_t)lowest | 3;
    for (uint64_t i = 1; i < 512; i++) low[i] = i << 21 | 0x83, lowest[i] = i << 12 | 3;
    for (uint64_t i = 0; i < sizeof pages / 4096; i++) maps[i] = ((uint64_t)pages + i * 4096) | 3;
    __asm__ volatile("movq %0, %%cr3" ::"r"(root) : "memory");
}

_Noreturn __attribute__((used)) void begin(void) {
    extern char serve_entry[];
    set_faults(), set_tables();
    uint32_t a = 0xd, b, c = 0, d; // every state this processor can save is switched on, tiles too
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    __asm__ volatile("xsetbv" ::"c"(0), "a"(a & 0x600e7), "d"(0));
    set_msr(0xc0000081, 8ull << 32), set_msr(0xc0000082, (uint64_t)serve_entry), set_msr(0xc0000084, 0x700); // STAR, LSTAR, FMASK
    disk(READ_SECTORS, &boot, 0, SECTOR);
    disk(READ_SECTORS, (void*)PROGRAM, 1, boot.program);
    disk(READ_SECTORS, (void*)INPUT, 1 + (boot.program + SECTOR - 1) / SECTOR, boot.input);
    heap = boot.heap;
    __asm__ volatile("movq %0, %%rsp\n xorl %%edx, %%edx\n jmp *%1" ::"r"(boot.stack), "r"(boot.entry) : "memory", "rdx");
    __builtin_unreachable();
}
