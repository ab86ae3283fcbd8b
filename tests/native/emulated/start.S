// The reset vector's side of the emulated machine's ROM: to 64-bit mode, then to kernel.c. The ROM is the 64 KiB below 1 MiB.
.set ROM, 0xf0000
.section .rom, "ax"

.code16
start:
    cli
    lgdtl %cs:gdt_pointer - ROM
    movl $tables, %eax
    movl %eax, %cr3
    movl $0x40620, %eax // PAE, FXSR, SIMD exceptions, XSAVE
    movl %eax, %cr4
    movl $0xc0000080, %ecx // EFER: long mode, syscall
    movl $0x101, %eax
    xorl %edx, %edx
    wrmsr
    movl $0x80000033, %eax // paging, native FPU errors, protected mode
    movl %eax, %cr0
    ljmpl $8, $long
.code64
long:
    movl $16, %eax
    movl %eax, %ds
    movl %eax, %es
    movl %eax, %ss
    leaq stack + 65536(%rip), %rsp
    call begin

.balign 8
gdt:
    .quad 0, 0x00af9b000000ffff, 0x00cf93000000ffff // none; 8: code; 16: data
gdt_pointer:
    .word 23
    .long gdt

// The first GiB as it is; accessed and dirty from the start, for a ROM cannot be marked.
.org 0x1000
tables:
    .quad ROM + 0x2023
.org 0x2000
    .quad 0xe3

.section .reset, "ax" // at 0xffff0, the last 16 bytes
.code16
    ljmp $0xf000, $start - ROM
.balign 16, 0

.section .text, "ax"
.code64
.globl serve_entry
serve_entry: // syscall: %rcx is where to go on; the caller's stack has a red zone
    movq %rsp, caller(%rip)
    leaq stack + 65536(%rip), %rsp
    pushq %rcx
    pushq %r9
    pushq %r8
    pushq %r10
    pushq %rdx
    pushq %rsi
    pushq %rdi
    pushq %rax
    movq %rsp, %rdi
    cld
    call serve
    addq $8, %rsp
    popq %rdi
    popq %rsi
    popq %rdx
    popq %r10
    popq %r8
    popq %r9
    popq %rcx
    movq caller(%rip), %rsp
    jmp *%rcx

.balign 16
.globl faults
faults: // sixteen bytes a vector; some push an error code themselves
.set v, 0
.rept 32
    .balign 16
    .if !((0x60227d00 >> v) & 1)
    pushq $0
    .endif
    pushq $v
    jmp 1f
    .set v, v + 1
.endr
1:  .irp r, r15, r14, r13, r12, r11, r10, r9, r8, rdi, rsi, rbp, rsp, rbx, rdx, rcx, rax // by their numbers, see kernel.c
    pushq %\r
    .endr
    movq %rsp, %rdi
    cld
    call fault
    .irp r, rax, rcx, rdx, rbx
    popq %\r
    .endr
    addq $8, %rsp
    .irp r, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15
    popq %\r
    .endr
    addq $16, %rsp
    iretq

.globl save_vectors, load_vectors
save_vectors: // all 32, at %rdi
.irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31
    vmovdqu64 %zmm\n, 64 * \n(%rdi)
.endr
    ret
load_vectors:
.irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31
    vmovdqu64 64 * \n(%rdi), %zmm\n
.endr
    ret

.bss
.balign 64
stack:
    .skip 65536
caller:
    .skip 8
.section .note.GNU-stack, "", @progbits
