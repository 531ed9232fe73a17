/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/* PCI functions of bus 0, by the configuration mechanism of the ports 0xcf8 and 0xcfc. */
#ifndef PCI_H
#define PCI_H

#include "machine.h"

#define PCI_SLOTS 32

#define PCI_ID 0x00
#define PCI_COMMAND 0x04
#define PCI_CLASS 0x08
#define PCI_BAR 0x10
#define PCI_CAPABILITIES 0x34

#define PCI_COMMAND_MEMORY 0x2
#define PCI_COMMAND_MASTER 0x4
#define PCI_NOTHING 0xffffffff
#define PCI_VENDOR_SPECIFIC 0x09

static inline void pci_select(unsigned int slot, unsigned int offset)
{
	out32(0xcf8, 0x80000000U | slot << 11 | (offset & 0xfc));
}

static inline uint32_t pci_read(unsigned int slot, unsigned int offset)
{
	pci_select(slot, offset);
	return in32(0xcfc);
}

/* Lets the function decode its memory and reach that of the machine. */
static inline void pci_enable(unsigned int slot)
{
	pci_select(slot, PCI_COMMAND);
	out16(0xcfc, PCI_COMMAND_MEMORY | PCI_COMMAND_MASTER);
}

/* The address of a memory BAR, of 32 or 64 bits. */
static inline uint64_t pci_bar(unsigned int slot, unsigned int number)
{
	uint32_t low = pci_read(slot, PCI_BAR + 4 * number);
	bool is_wide = (low & 6) == 4;
	uint64_t high = is_wide ? pci_read(slot, PCI_BAR + 4 * number + 4) : 0;

	return high << 32 | (low & ~15U);
}

#endif
