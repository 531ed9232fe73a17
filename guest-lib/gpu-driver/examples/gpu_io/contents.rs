//! Contents that can be told from seed and offset.

/// The eight bytes of a file with this seed from offset `8 * index` on (`SplitMix64`).
fn word(seed: u64, index: u64) -> u64 {
    let mut z = seed
        .wrapping_mul(0xd134_2543_de82_ef95)
        .wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// Makes `data` the contents with `seed` from byte `offset` on.
pub fn fill(seed: u64, offset: u64, data: &mut [u8]) {
    let mut index = offset / 8;
    let skip = usize::try_from(offset % 8).unwrap_or(0);
    let (head, rest) = data.split_at_mut(data.len().min(if skip == 0 { 0 } else { 8 - skip }));
    if skip != 0 {
        let bytes = word(seed, index).to_le_bytes();
        head.copy_from_slice(&bytes[skip..skip + head.len()]);
        index += 1;
    }
    for chunk in rest.chunks_mut(8) {
        let bytes = word(seed, index).to_le_bytes();
        chunk.copy_from_slice(&bytes[..chunk.len()]);
        index += 1;
    }
}

/// The same, made.
pub fn make(seed: u64, offset: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    fill(seed, offset, &mut data);
    data
}

/// The first byte in which both differ.
pub fn difference(is: &[u8], should: &[u8]) -> Option<usize> {
    if is == should {
        return None;
    }
    is.iter()
        .zip(should)
        .position(|(a, b)| a != b)
        .or(Some(is.len().min(should.len())))
}
