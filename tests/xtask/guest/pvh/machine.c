// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/* What machine.h declares. */
#include "machine.h"

#include <stdarg.h>

#define SERIAL 0x3f8
#define SERIAL_STATUS (SERIAL + 5)
#define STATUS_DATA 0x01
#define STATUS_ROOM 0x20

/* The ACPI power management timer: 24 bits, 3.579545 MHz. */
#define TIMER 0x608
#define TIMER_MASK 0xffffff
#define TICKS_PER_SECOND 3579545UL
#define PATIENCE_SECONDS 40

/* The keyboard controller, and what resets the machine there. */
#define KEYBOARD 0x64
#define PULSE_RESET 0xfe

#define LARGE_PAGE 0x200000UL
#define DEVICE_WINDOW 0x8000000000UL
#define PRESENT_WRITABLE 0x003
#define UNCACHED_LARGE 0x09b

#define POOL_BYTES (24UL << 20)

extern uint64_t page_map[512];

static uint64_t device_pointers[512] __attribute__((aligned(4096)));
static uint64_t device_directory[512] __attribute__((aligned(4096)));
/* Not cleared with the rest: see memset(). */
static uint8_t pool[POOL_BYTES] __attribute__((aligned(4096), section(".pool,\"aw\",@nobits#")));

/* By words as far as that goes: where KVM emulates instructions, each access takes microseconds. */
void *memset(void *to, int byte, size_t length)
{
	volatile uint64_t *words = to;
	volatile uint8_t *bytes = to;
	size_t at = 0;

	if (address_of(to) % 8 == 0)
		for (; at + 8 <= length; at += 8)
			words[at / 8] = (uint8_t)byte * 0x0101010101010101UL;
	for (; at < length; at++)
		bytes[at] = (uint8_t)byte;
	return to;
}

void *memcpy(void *to, const void *from, size_t length)
{
	for (size_t at = 0; at < length; at++)
		((volatile uint8_t *)to)[at] = ((const uint8_t *)from)[at];
	return to;
}

int memcmp(const void *a, const void *b, size_t length)
{
	const uint8_t *left = a, *right = b;

	for (size_t at = 0; at < length; at++)
		if (left[at] != right[at])
			return left[at] < right[at] ? -1 : 1;
	return 0;
}

static void put(char c)
{
	while (!(in8(SERIAL_STATUS) & STATUS_ROOM))
		;
	out8(SERIAL, (uint8_t)c);
}

static void put_number(uint64_t number, unsigned int base)
{
	char digits[20];
	unsigned int count = 0;

	do {
		digits[count++] = "0123456789abcdef"[number % base];
		number /= base;
	} while (number);
	while (count)
		put(digits[--count]);
}

void say(const char *format, ...)
{
	va_list values;

	va_start(values, format);
	for (; *format; format++) {
		if (*format != '%') {
			put(*format);
			continue;
		}
		switch (*++format) {
		case 's':
			for (const char *text = va_arg(values, const char *); *text; text++)
				put(*text);
			break;
		case 'c':
			put((char)va_arg(values, int));
			break;
		case 'u':
			put_number(va_arg(values, unsigned int), 10);
			break;
		case 'l': /* %lx */
			format++;
			put_number(va_arg(values, unsigned long), 16);
			break;
		}
	}
	va_end(values);
	put('\n');
}

bool heard(char *line, size_t size)
{
	static size_t length;

	while (in8(SERIAL_STATUS) & STATUS_DATA) {
		char c = (char)in8(SERIAL);

		if (c == '\n') {
			line[length] = 0;
			length = 0;
			return true;
		}
		if (length < size - 1)
			line[length++] = c;
	}
	return false;
}

void *buffers(size_t bytes)
{
	static size_t used;
	size_t at = used;

	used += (bytes + PAGE - 1) & ~(PAGE - 1);
	if (used <= POOL_BYTES)
		return pool + at;
	say("bad no memory is left");
	for (;;)
		;
}

void *pages(size_t bytes)
{
	return memset(buffers(bytes), 0, bytes);
}

void *map_device(uint64_t physical, uint64_t bytes)
{
	static unsigned int used;
	uint64_t first = physical & ~(LARGE_PAGE - 1);
	uint64_t at = DEVICE_WINDOW + used * LARGE_PAGE + (physical - first);

	page_map[DEVICE_WINDOW >> 39] = address_of(device_pointers) | PRESENT_WRITABLE;
	device_pointers[0] = address_of(device_directory) | PRESENT_WRITABLE;
	for (uint64_t page = first; page < physical + bytes; page += LARGE_PAGE)
		device_directory[used++ % 512] = page | UNCACHED_LARGE;
	__asm__ volatile("mov %%cr3, %%rax; mov %%rax, %%cr3" : : : "rax", "memory");
	return (void *)at;
}

struct deadline deadline_from_now(void)
{
	return (struct deadline){in32(TIMER), PATIENCE_SECONDS * TICKS_PER_SECOND};
}

bool is_over(struct deadline *deadline)
{
	uint32_t now = in32(TIMER);
	uint32_t passed = (now - deadline->last) & TIMER_MASK;

	deadline->last = now;
	deadline->left -= passed < deadline->left ? passed : deadline->left;
	__asm__ volatile("pause");
	return deadline->left == 0;
}

void reboot(void)
{
	out8(KEYBOARD, PULSE_RESET);
	for (;;)
		__asm__ volatile("hlt");
}
