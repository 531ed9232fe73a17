/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * Where the VMM enters the guest (Xen's x86/HVM direct boot ABI, "PVH"): 32-bit protected mode without paging. Clears the
 * memory that the file does not hold, maps the first 4 GiB to themselves, and calls main() in 64-bit mode.
 */
#define XEN_ELFNOTE_PHYS32_ENTRY 18

#define PRESENT_WRITABLE 0x3
#define LARGE 0x80

#define CR0_PG 0x80000000
#define CR4_PAE 0x20
#define MSR_EFER 0xc0000080
#define EFER_LME 0x100

	.section .note.pvh, "a", @note
	.align	4
	.long	4, 4, XEN_ELFNOTE_PHYS32_ENTRY
	.asciz	"Xen"
	.long	start

	.section .text.start, "ax"
	.code32
	.globl	start
start:
	cli
	cld
	mov	$bss_start, %edi
	mov	$bss_end, %ecx
	sub	%edi, %ecx
	shr	$2, %ecx
	xor	%eax, %eax
	rep stosl

	movl	$(page_directory_pointers + PRESENT_WRITABLE), page_map
	mov	$(page_directories + PRESENT_WRITABLE), %eax
	xor	%ecx, %ecx
1:	mov	%eax, page_directory_pointers(, %ecx, 8)
	add	$0x1000, %eax
	inc	%ecx
	cmp	$4, %ecx
	jne	1b

	mov	$(PRESENT_WRITABLE + LARGE), %eax
	xor	%ecx, %ecx
2:	mov	%eax, page_directories(, %ecx, 8)
	add	$0x200000, %eax
	inc	%ecx
	cmp	$2048, %ecx
	jne	2b

	mov	$page_map, %eax
	mov	%eax, %cr3
	mov	%cr4, %eax
	or	$CR4_PAE, %eax
	mov	%eax, %cr4
	mov	$MSR_EFER, %ecx
	rdmsr
	or	$EFER_LME, %eax
	wrmsr
	mov	%cr0, %eax
	or	$CR0_PG, %eax
	mov	%eax, %cr0
	lgdt	descriptors_at
	ljmp	$8, $in_64_bits

	.code64
in_64_bits:
	mov	$16, %eax
	mov	%eax, %ds
	mov	%eax, %es
	mov	%eax, %ss
	mov	$stack_end, %rsp
	xor	%ebp, %ebp
	call	main
3:	hlt
	jmp	3b

	.section .rodata
	.align	8
descriptors:
	.quad	0
	.quad	0x00209a0000000000	/* code, 64 bits */
	.quad	0x0000920000000000	/* data */
descriptors_at:
	.word	. - descriptors - 1
	.long	descriptors

	.bss
	.align	4096
	.globl	page_map
page_map:
	.skip	4096
page_directory_pointers:
	.skip	4096
page_directories:
	.skip	4 * 4096
	.skip	65536
stack_end:

	.section .note.GNU-stack, "", @progbits
