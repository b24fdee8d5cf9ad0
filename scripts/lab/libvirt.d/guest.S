/* A guest for egm-vmm, entered by PVH: 32-bit protected mode without paging. It prints "count 00000001",
   "count 00000002", ... to the serial port for ever. Of the keys that it receives, q powers it off, r resets it, and
   every other one is printed in brackets. */
        .section .note.Xen, "a", @note
        .long 4, 4, 18                  /* sizes of name and value; XEN_ELFNOTE_PHYS32_ENTRY */
        .asciz "Xen"
        .long _start

        .code32
        .text
        .globl _start
_start: mov $stack, %esp
        xor %ebx, %ebx
next:   inc %ebx
        mov $text, %esi
1:      lodsb
        test %al, %al
        jz 2f
        call put
        jmp 1b
2:      mov %ebx, %edi                  /* eight digits, the highest first */
        mov $8, %ecx
3:      rol $4, %edi
        mov %edi, %eax
        and $15, %eax
        mov digits(%eax), %al
        call put
        loop 3b
        mov $'\n', %al
        call put
        mov $0x20000, %ecx              /* a pause */
4:      loop 4b
        mov $0x3fd, %edx                /* line status: has a key come? */
        in %dx, %al
        test $1, %al
        jz next
        mov $0x3f8, %edx
        in %dx, %al
        cmp $'q', %al
        je off
        cmp $'r', %al
        je reset
        mov %eax, %edi
        mov $'[', %al
        call put
        mov %edi, %eax
        call put
        mov $']', %al
        call put
        jmp next
off:    mov $0x600, %edx                /* sleep control register of ACPI: S5 */
        mov $0x34, %al
        out %al, %dx
        hlt
reset:  mov $0x604, %edx                /* reset register of ACPI */
        mov $1, %al
        out %al, %dx
        hlt
put:    mov $0x3f8, %edx
        out %al, %dx
        ret
text:   .asciz "count "
digits: .ascii "0123456789abcdef"
        .bss
        .skip 4096
stack:
