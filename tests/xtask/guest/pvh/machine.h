/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * The machine that a VMM gives the guest: ports, memory of devices, the serial port, time. One processor, no interrupts:
 * everything is looked at until it is so.
 */
#ifndef MACHINE_H
#define MACHINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PAGE 4096UL

static inline void out8(uint16_t port, uint8_t value)
{
	__asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port) : "memory");
}

static inline void out16(uint16_t port, uint16_t value)
{
	__asm__ volatile("outw %0, %1" : : "a"(value), "Nd"(port) : "memory");
}

static inline void out32(uint16_t port, uint32_t value)
{
	__asm__ volatile("outl %0, %1" : : "a"(value), "Nd"(port) : "memory");
}

static inline uint8_t in8(uint16_t port)
{
	uint8_t value;

	__asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port) : "memory");
	return value;
}

static inline uint32_t in32(uint16_t port)
{
	uint32_t value;

	__asm__ volatile("inl %1, %0" : "=a"(value) : "Nd"(port) : "memory");
	return value;
}

/* Device memory is accessed by plain moves alone, which any VMM can carry out. */
static inline uint8_t read8(const void *at)
{
	uint8_t value;

	__asm__ volatile("movb (%1), %0" : "=q"(value) : "r"(at) : "memory");
	return value;
}

static inline uint16_t read16(const void *at)
{
	uint16_t value;

	__asm__ volatile("movw (%1), %0" : "=r"(value) : "r"(at) : "memory");
	return value;
}

static inline uint32_t read32(const void *at)
{
	uint32_t value;

	__asm__ volatile("movl (%1), %0" : "=r"(value) : "r"(at) : "memory");
	return value;
}

static inline void write8(void *at, uint8_t value)
{
	__asm__ volatile("movb %1, (%0)" : : "r"(at), "q"(value) : "memory");
}

static inline void write16(void *at, uint16_t value)
{
	__asm__ volatile("movw %1, (%0)" : : "r"(at), "r"(value) : "memory");
}

static inline void write32(void *at, uint32_t value)
{
	__asm__ volatile("movl %1, (%0)" : : "r"(at), "r"(value) : "memory");
}

static inline void write64(void *at, uint64_t value)
{
	write32(at, (uint32_t)value);
	write32((char *)at + 4, (uint32_t)(value >> 32));
}

/* Memory is seen as it is now, and what was written is seen by others before what is written later. */
static inline void fence(void)
{
	__sync_synchronize();
}

static inline uint64_t address_of(const volatile void *memory)
{
	return (uint64_t)memory;
}

void *memset(void *to, int byte, size_t length);
void *memcpy(void *to, const void *from, size_t length);
int memcmp(const void *a, const void *b, size_t length);

/* Memory of its own pages, for as long as the guest runs; and the same, zeroed. */
void *buffers(size_t bytes);
void *pages(size_t bytes);

/* Where `bytes` of device memory at a physical address are seen. */
void *map_device(uint64_t physical, uint64_t bytes);

/* Says a line on the serial port: %s, %u (unsigned), %x (uint64_t), %c. */
void say(const char *format, ...) __attribute__((format(gnu_printf, 1, 2)));

/* Whether the host has sent a line; it is in `line` then, without its end. */
bool heard(char *line, size_t size);

/* Time that a thing may take. */
struct deadline {
	uint32_t last;
	uint64_t left;
};

struct deadline deadline_from_now(void);

/* Whether the time is over. To be asked again and again. */
bool is_over(struct deadline *deadline);

/* Boots the machine anew. */
void reboot(void) __attribute__((noreturn));

#endif
