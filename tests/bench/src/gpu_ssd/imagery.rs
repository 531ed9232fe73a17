//! Reads of a program that renders aerial imagery (spin-atc17, section 6.2): regions in full HD of
//! a raster, which a file has row by row or tile by tile.

use anyhow::Result;
use farlane_io_core::plan::oracle::Random;

/// Bytes of a pixel.
const PIXEL: u64 = 3;
/// A screen.
const SCREEN: (u64, u64) = (1920, 1080);
/// Pixels of the raster's sides at the highest resolution; each other resolution has half as many.
const SIDE: u64 = 16_384;
const RESOLUTIONS: u64 = 3;

/// How the raster lies in the file.
#[derive(Clone, Copy, Debug)]
pub enum Layout {
    /// As one vector: each row of each tile of so many pixels is a read.
    Raster { tile: u64 },
    /// As a vector of tiles of so many pixels, each a vector: a read each.
    Tiles { tile: u64 },
}

/// Bytes of the file.
pub fn bytes() -> u64 {
    (0..RESOLUTIONS).map(|r| (SIDE >> r).pow(2) * PIXEL).sum()
}

/// The reads for `regions` random views.
pub fn reads(random: &mut Random, layout: Layout, regions: u32) -> Result<Vec<(u64, u32)>> {
    let mut reads = Vec::new();
    for _ in 0..regions {
        let resolution = random.below(RESOLUTIONS);
        let side = SIDE >> resolution;
        let start: u64 = (0..resolution).map(|r| (SIDE >> r).pow(2) * PIXEL).sum();
        let left = random.below(side - SCREEN.0);
        let top = random.below(side - SCREEN.1);
        let tile = match layout {
            Layout::Raster { tile } | Layout::Tiles { tile } => tile,
        };
        let columns = left / tile..(left + SCREEN.0).div_ceil(tile).min(side / tile);
        let rows = top / tile..(top + SCREEN.1).div_ceil(tile).min(side / tile);
        match layout {
            Layout::Raster { .. } => {
                // What of the view is in each tile, row by row.
                for column in columns {
                    let from = left.max(column * tile);
                    let to = (left + SCREEN.0).min((column + 1) * tile);
                    let length = u32::try_from((to - from) * PIXEL)?;
                    let offset = |y| start + (y * side + from) * PIXEL;
                    reads.extend((top..top + SCREEN.1).map(|y| (offset(y), length)));
                }
            }
            Layout::Tiles { .. } => {
                let length = u32::try_from(tile * tile * PIXEL)?;
                let number = |row, column| row * (side / tile) + column;
                for row in rows {
                    reads.extend(columns.clone().map(|column| {
                        let offset = start + number(row, column) * u64::from(length);
                        (offset, length)
                    }));
                }
            }
        }
    }
    reads.retain(|read| read.1 > 0);
    Ok(reads)
}
