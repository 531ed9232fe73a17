//! How registers and video memory are reached.

/// The regions of a device.
///
/// # Safety
/// [`memory`](Self::memory) always returns the same range, which can be read and written as long as
/// the value lives. Others, the device among them, may write it at any time; nobody else in this
/// process does.
pub unsafe trait Bars: Send + Sync {
    /// Reads the register at an offset in BAR 0, in bytes: a multiple of four. All ones where the
    /// device is gone.
    fn read32(&self, offset: u32) -> u32;

    /// Writes the register at an offset in BAR 0, in bytes: a multiple of four.
    fn write32(&self, offset: u32, value: u32);

    /// Video memory: first byte, a multiple of the page size, and bytes.
    fn memory(&self) -> (*mut u8, usize);
}
