//! Rows as plots, in SVG. Measures nothing.

use std::path::Path;

use anyhow::{Context as _, anyhow};
use plotters::prelude::*;

use super::run::Outcome;

const COLOURS: [RGBColor; 7] = [
    RGBColor(0x66, 0x66, 0x66),
    RGBColor(0x1b, 0x5e, 0xa8),
    RGBColor(0x5a, 0xa5, 0xe8),
    RGBColor(0xc6, 0x4a, 0x1e),
    RGBColor(0xf0, 0xa0, 0x70),
    RGBColor(0x4a, 0x7d, 0x2a),
    RGBColor(0x9c, 0xc8, 0x7c),
];
const FONT: (&str, i32) = ("sans-serif", 14);
const QUANTILES: [&str; 4] = ["p50", "p99", "p99.9", "max"];
/// Of a group of bars, the part that they take.
const FILLED: f64 = 0.8;

/// The ratio of each way in each case; a bar begins at 1, which is raw's.
pub fn ratios(path: &Path, results: &[Outcome]) -> anyhow::Result<()> {
    let width = 160 + 90 * results.len() as u32;
    let area = SVGBackend::new(path, (width.max(480), 420)).into_drawing_area();
    draw_ratios(&area, results).map_err(|error| anyhow!("{error}"))?;
    let done = area.present();
    done.map_err(|error| anyhow!("{error}"))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// How long each way waited at one rate for all; at full speed where there is none of that.
pub fn waits(path: &Path, result: &Outcome) -> anyhow::Result<()> {
    let area = SVGBackend::new(path, (640, 360)).into_drawing_area();
    draw_waits(&area, result).map_err(|error| anyhow!("{error}"))?;
    let done = area.present();
    done.map_err(|error| anyhow!("{error}"))
        .with_context(|| format!("cannot write {}", path.display()))
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Drawn<'a> = Result<(), Box<dyn std::error::Error + 'a>>;

fn draw_ratios<'a>(area: &Area<'a>, results: &[Outcome]) -> Drawn<'a> {
    let ratios = results.iter().flat_map(|result| &result.rows);
    let [low, high] = bounds(ratios.map(|row| row.ratio).chain([0.5, 2.0]));
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(area)
        .margin(10)
        .caption("pairs per second, to those of the raw commands", FONT)
        .x_label_area_size(30)
        .y_label_area_size(50)
        .build_cartesian_2d(0.0..results.len() as f64, (low..high).log_scale())?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(0)
        .y_label_formatter(&|ratio| format!("{ratio}"))
        .draw()?;
    let ways = results.iter().max_by_key(|result| result.rows.len());
    let ways = ways
        .map(|result| result.rows.as_slice())
        .unwrap_or_default();
    for (row, colour) in ways.iter().zip(COLOURS) {
        let bars = results.iter().enumerate().filter_map(|(group, result)| {
            let at = result
                .rows
                .iter()
                .position(|each| each.way() == row.way())?;
            let width = FILLED / result.rows.len() as f64;
            let left = group as f64 + (1.0 - FILLED) / 2.0 + width * at as f64;
            let ratio = result.rows[at].ratio.max(low);
            Some(Rectangle::new(
                [(left, 1.0), (left + width, ratio)],
                colour.filled(),
            ))
        });
        chart
            .draw_series(bars)?
            .label(row.way())
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
    }
    let baseline = [(0.0, 1.0), (results.len() as f64, 1.0)];
    chart.draw_series(LineSeries::new(baseline, BLACK))?;
    let labels = results.iter().enumerate().map(|(group, result)| {
        let place = (group as f64 + 0.1, low * 1.15);
        Text::new(result.name, place, ("sans-serif", 10))
    });
    chart.draw_series(labels)?;
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .draw()?;
    Ok(())
}

fn draw_waits<'a>(area: &Area<'a>, result: &Outcome) -> Drawn<'a> {
    let is_paced = result.rows.iter().any(|row| row.paced.is_some());
    let lines = || {
        result.rows.iter().zip(COLOURS).filter_map(|(row, colour)| {
            let paced = row.paced.as_ref().map(|paced| paced.wait);
            let wait = if is_paced { paced } else { row.wait };
            Some((row.way(), colour, wait?.all()))
        })
    };
    let [low, high] = bounds(lines().flat_map(|(_, _, waits)| waits));
    let pace = if is_paced {
        "half of raw's rate"
    } else {
        "full speed"
    };
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(area)
        .margin(10)
        .caption(
            format!("{}: µs from asking to having, at {pace}", result.name),
            FONT,
        )
        .x_label_area_size(30)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..QUANTILES.len() as f64 - 1.0, (low..high).log_scale())?;
    chart
        .configure_mesh()
        .x_labels(QUANTILES.len())
        .x_label_formatter(&|at| QUANTILES[at.round() as usize].to_owned())
        .y_label_formatter(&|micros| format!("{micros}"))
        .draw()?;
    for (way, colour, waits) in lines() {
        let points = (0..).map(f64::from).zip(waits);
        chart
            .draw_series(LineSeries::new(points, colour.stroke_width(2)))?
            .label(way)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .draw()?;
    Ok(())
}

/// From a power of ten to another, with all figures in between.
fn bounds(figures: impl Iterator<Item = f64>) -> [f64; 2] {
    // (On an endless axis, plotters would draw for ever.)
    let seen: Vec<f64> = figures
        .filter(|figure| *figure > 0.0 && figure.is_finite())
        .collect();
    let lowest = seen.iter().copied().fold(1.0, f64::min);
    let highest = seen.iter().copied().fold(1.0, f64::max);
    [lowest.log10().floor(), highest.log10().ceil()].map(|power| 10_f64.powf(power))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_powers_of_ten_around_all_figures() {
        let [low, high] = bounds([0.02, 0.0, 340.0, f64::INFINITY, f64::NAN].into_iter());
        assert!((low - 0.01).abs() < 1e-9 && (high - 1000.0).abs() < 1e-9);
    }
}
