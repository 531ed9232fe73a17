//! Fits of made and of measured times.
#![allow(clippy::unwrap_used)]

use farlane_io_core::plan::oracle::{Random, p3700};
use farlane_io_core::plan::{CostModel, FitError, Parameters, Sample, fit};

/// 4 KiB to 16 MiB.
fn sizes() -> impl Iterator<Item = u64> {
    (12..=24).map(|bits| 1 << bits)
}

/// Times of a device, `noise` being the share by which a time may be off either way; one in ten
/// takes ten times as long.
fn measure(model: &CostModel, noise: f64) -> (Vec<Sample>, Vec<Sample>) {
    let mut random = Random::new(7);
    let mut sample = |bytes, nanoseconds: f64| {
        let spike = if random.below(10) == 0 { 10.0 } else { 1.0 };
        Sample {
            bytes,
            nanoseconds: nanoseconds * spike * (1.0 + noise * (2.0 * random.unit() - 1.0)),
        }
    };
    let (mut p2p, mut cache) = (Vec::new(), Vec::new());
    for bytes in sizes() {
        for _ in 0..15 {
            p2p.push(sample(bytes, model.p2p_ns(bytes)));
            cache.push(sample(bytes, model.cache_ns(bytes)));
        }
    }
    (p2p, cache)
}

fn near(found: f64, right: f64, share: f64) {
    assert!((found / right - 1.0).abs() < share, "{found} for {right}");
}

#[test]
fn a_fit_finds_the_device_behind_noisy_times() {
    let devices = [
        p3700().parameters(),
        Parameters {
            cutoff_bytes: 8 << 10,
            p2p_overhead_ns: 48_000.0,
            p2p_bandwidth: 1.1e9,
            cache_overhead_ns: 700.0,
            cache_bandwidth: 6e9,
            readahead_bandwidth: None,
        },
        Parameters {
            cutoff_bytes: 128 << 10,
            p2p_overhead_ns: 80_000.0,
            p2p_bandwidth: 6.5e9,
            cache_overhead_ns: 400.0,
            cache_bandwidth: 11e9,
            readahead_bandwidth: None,
        },
    ];
    for right in devices {
        let (p2p, cache) = measure(&CostModel::new(right).unwrap(), 0.05);
        let fit = fit(&p2p, &cache).unwrap();
        let found = fit.model.parameters();
        assert!(fit.r2_p2p > 0.99 && fit.r2_cache > 0.99, "{fit:?}");
        near(found.p2p_overhead_ns, right.p2p_overhead_ns, 0.1);
        near(found.p2p_bandwidth, right.p2p_bandwidth, 0.1);
        near(found.cache_bandwidth, right.cache_bandwidth, 0.1);
        let cutoff = |p: Parameters| f64::from(u32::try_from(p.cutoff_bytes).unwrap());
        near(cutoff(found), cutoff(right), 0.25);
    }
}

#[test]
fn a_device_without_a_cutoff_is_a_straight_line() {
    // As a disk that another process serves from its memory: overhead and bandwidth, no plateau.
    let line = |bytes: u64| 44_000.0 + 0.9 * f64::from(u32::try_from(bytes).unwrap());
    let p2p: Vec<_> = sizes()
        .flat_map(|bytes| {
            [Sample {
                bytes,
                nanoseconds: line(bytes),
            }; 3]
        })
        .collect();
    let fit = fit(&p2p, &measure(&p3700(), 0.01).1).unwrap();
    for bytes in sizes() {
        near(fit.model.p2p_ns(bytes), line(bytes), 0.02);
    }
}

#[test]
fn times_that_make_no_model_are_refused_with_the_reason() {
    let (p2p, cache) = measure(&p3700(), 0.02);
    let some = |keep: fn(u64) -> bool| -> Vec<_> {
        p2p.iter().filter(|s| keep(s.bytes)).copied().collect()
    };
    let timed = |time: &dyn Fn(u64) -> f64| -> Vec<_> {
        let mut made = Vec::new();
        for bytes in sizes() {
            made.extend(
                [Sample {
                    bytes,
                    nanoseconds: time(bytes),
                }; 3],
            );
        }
        made
    };
    let float = |bytes: u64| f64::from(u32::try_from(bytes).unwrap());
    assert!(matches!(
        fit(&[], &cache),
        Err(FitError::FewSizes { found: 0, .. })
    ));
    assert!(matches!(
        fit(&some(|bytes| bytes < 64 << 10), &cache),
        Err(FitError::FewSizes { found: 4, .. })
    ));
    assert!(matches!(
        fit(&some(|bytes| bytes >= 512 << 10), &cache),
        Err(FitError::NarrowSizes { .. })
    ));
    assert!(matches!(
        fit(&timed(&|_| f64::NAN), &cache),
        Err(FitError::Time { .. })
    ));
    assert!(matches!(
        fit(&timed(&|_| 0.0), &cache),
        Err(FitError::Time { .. })
    ));
    let faster = timed(&|bytes| 1e6 - float(bytes) / 32.0);
    assert!(
        matches!(fit(&faster, &cache), Err(FitError::NoBandwidth { .. })),
        "{:?}",
        fit(&faster, &cache)
    );
    let mut random = Random::new(3);
    let scattered: Vec<_> = sizes()
        .flat_map(|bytes| {
            [Sample {
                bytes,
                nanoseconds: 1e5 + 1e7 * random.unit(),
            }; 3]
        })
        .collect();
    let refused = fit(&scattered, &cache);
    assert!(
        matches!(
            refused,
            Err(FitError::Scattered { .. } | FitError::NoBandwidth { .. })
        ),
        "{refused:?}"
    );
    // A device that has the smaller transfers in a memory of its own: another shape.
    let bent = timed(&|bytes| {
        if bytes < 1 << 20 {
            100.0
        } else {
            0.4 * float(bytes)
        }
    });
    assert!(fit(&bent, &cache).is_err());
    assert!(fit(&p2p, &cache).is_ok());
}
