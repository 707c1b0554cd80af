//! Rows as plots, in SVG. Measures nothing.

use leasehold_tools::chart::{Chart, Colour, Series};

use crate::run::Outcome;

/// A plot of the ratio of each way to `raw` in each case. The ratio of `raw` itself is 1.
pub fn ratios(results: &[Outcome]) -> anyhow::Result<String> {
    let names: Vec<_> = results.iter().map(|result| result.name.as_str()).collect();
    let longest = results.iter().max_by_key(|result| result.rows.len());
    let ways = longest.iter().flat_map(|result| &result.rows).skip(1);
    let series = ways.map(|row| {
        let ratio = |result: &Outcome| {
            let mut rows = result.rows.iter();
            let own = rows.find(|each| each.way() == row.way());
            own.map(|own| own.ratio)
        };
        Series {
            name: row.way(),
            colour: colour(row.way()),
            figures: results.iter().map(ratio).collect(),
        }
    });
    let chart = Chart {
        title: "Pairs of lock and release per second, divided by those of the raw commands",
        across: "case",
        places: &names,
        up: "ratio to raw",
        series: series.collect(),
    };
    chart.ratios()
}

/// A plot of the waits of each way: all at the same rate, or all at full speed if a way could not keep that rate.
pub fn waits(result: &Outcome) -> anyhow::Result<String> {
    let is_paced = result.rows.iter().any(|row| row.paced.is_some());
    let pace = if is_paced {
        "half of raw's rate"
    } else {
        "full speed"
    };
    let series = result.rows.iter().filter_map(|row| {
        let paced = row.paced.as_ref().map(|paced| paced.wait);
        let wait = if is_paced { paced } else { row.wait };
        Some(Series {
            name: row.way(),
            colour: colour(row.way()),
            figures: wait?.all().map(Some).to_vec(),
        })
    });
    let chart = Chart {
        title: &format!("{}: waits for locks, at {pace}", result.name),
        across: "quantile of all locks",
        places: &["p50", "p99", "p99.9", "max"],
        up: "wait from request to lock, µs",
        series: series.collect(),
    };
    chart.lines()
}

/// The colour of a way, the same in every chart.
fn colour(way: &str) -> Colour {
    match way {
        "drop" => Colour(0x1b, 0x5e, 0xa8),
        "raw-piped" => Colour(0x3c, 0x3c, 0x3c),
        "limit" => Colour(0xa8, 0xa8, 0xa8),
        "unlock" => Colour(0x5a, 0xa5, 0xe8),
        "with_lock" => Colour(0x8e, 0x5a, 0xc8),
        "fair-mutex" => Colour(0x8a, 0x8a, 0x5a),
        "fair-queue" => Colour(0xc0, 0xa0, 0x30),
        "rslock" => Colour(0xc6, 0x4a, 0x1e),
        "redlock" => Colour(0x4a, 0x7d, 0x2a),
        way if way.starts_with("rslock-") => Colour(0xf0, 0xa0, 0x70),
        way if way.starts_with("redlock-") => Colour(0x9c, 0xc8, 0x7c),
        _ => Colour(0x66, 0x66, 0x66),
    }
}
