/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * A boot sector that asks the BIOS for sectors: of each disk that there is, the second one is read,
 * and written to the third.
 */
	.code16
	.globl	_start
_start:
	xorw	%ax, %ax
	movw	%ax, %ds
	movw	%ax, %es
	movw	%ax, %ss
	movw	$0x7c00, %sp
	movb	$0x80, %dl		/* the first disk */
disk:
	movb	$0, %dh			/* head */
	movw	$0x7e00, %bx
	movw	$0x0002, %cx		/* cylinder 0, sector 2, from 1 */
	movw	$0x0201, %ax		/* read one sector */
	int	$0x13
	jc	next
	movb	$0, %dh
	movw	$0x7e00, %bx
	movw	$0x0003, %cx
	movw	$0x0301, %ax		/* write one sector */
	int	$0x13
next:
	incb	%dl
	cmpb	$0x84, %dl
	jne	disk
halt:
	hlt
	jmp	halt
	.org	510
	.word	0xaa55
