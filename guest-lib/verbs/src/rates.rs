//! `enum ibv_rate`: static rates as multiples of 2.5 Gbit/s and in Mbit/s (IBTA 9.11.1).

/// Rate, multiple of 2.5 Gbit/s where it is a whole one, Mbit/s.
const RATES: &[(u32, Option<i32>, i32)] = &[
    (2, Some(1), 2500),
    (3, Some(4), 10000),
    (4, Some(12), 30000),
    (5, Some(2), 5000),
    (6, Some(8), 20000),
    (7, Some(16), 40000),
    (8, Some(24), 60000),
    (9, Some(32), 80000),
    (10, Some(48), 120000),
    (11, None, 14062),
    (12, None, 56250),
    (13, None, 112500),
    (14, None, 168750),
    (15, None, 25781),
    (16, None, 103125),
    (17, None, 206250),
    (18, None, 309375),
    (19, Some(11), 28125),
    (20, Some(20), 53125),
    (21, Some(160), 425000),
    (22, Some(240), 637500),
    (23, Some(320), 850000),
    (24, Some(480), 1275000),
];

/// `IBV_RATE_MAX`: no limit, and the answer for a number that is no rate.
const RATE_MAX: u32 = 0;

/// The rate as a multiple of 2.5 Gbit/s, -1 where it is none.
#[must_use]
pub fn to_mult(rate: u32) -> i32 {
    RATES
        .iter()
        .find(|r| r.0 == rate)
        .and_then(|r| r.1)
        .unwrap_or(-1)
}

/// The rate that is `mult` times 2.5 Gbit/s.
#[must_use]
pub fn from_mult(mult: i32) -> u32 {
    RATES
        .iter()
        .find(|r| r.1 == Some(mult))
        .map_or(RATE_MAX, |r| r.0)
}

/// The rate in Mbit/s, -1 where it is none.
#[must_use]
pub fn to_mbps(rate: u32) -> i32 {
    RATES.iter().find(|r| r.0 == rate).map_or(-1, |r| r.2)
}

/// The rate of `mbps` Mbit/s.
#[must_use]
pub fn from_mbps(mbps: i32) -> u32 {
    RATES.iter().find(|r| r.2 == mbps).map_or(RATE_MAX, |r| r.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_convert_both_ways() {
        for &(rate, mult, mbps) in RATES {
            assert_eq!(to_mbps(rate), mbps);
            assert_eq!(from_mbps(mbps), rate);
            assert_eq!(to_mult(rate), mult.unwrap_or(-1));
            if let Some(mult) = mult {
                assert_eq!(from_mult(mult), rate);
            }
        }
    }

    #[test]
    fn what_is_no_rate_is_answered_as_rdma_core_does() {
        assert_eq!((to_mult(0), to_mbps(1), to_mbps(25)), (-1, -1, -1));
        assert_eq!((from_mult(3), from_mbps(1)), (RATE_MAX, RATE_MAX));
    }
}
