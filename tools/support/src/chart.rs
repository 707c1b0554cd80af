//! Draws all charts, in SVG. A chart has named places side by side, lines or bars over the places, and a legend to the
//! right.

use std::ops::Range;

use anyhow::ensure;
use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

/// The colour of a series.
pub use plotters::style::RGBColor as Colour;

const TITLE: (&str, i32) = ("sans-serif", 15);
const LABEL: (&str, i32) = ("sans-serif", 12);
const HEIGHT: u32 = 340;
/// The width for the names of the series.
const LEGEND: u32 = 130;
/// The width for the labels of the axis, with the margins.
const BESIDE: u32 = 84;
const LINE_HEIGHT: i32 = 20;
/// The width of a place in a chart of lines, in which its name is readable, and the least width of all places.
const PLACE: u32 = 70;
const NARROWEST: u32 = 360;
/// The share of a place's width that its bars take.
const FILLED: f64 = 0.8;
/// The most marks on an axis that are readable.
const MOST_MARKS: usize = 16;
/// Larger figures are not shown. (On an endless axis, plotters would not stop drawing.)
const LARGEST: f64 = 1e12;

/// A chart, and what is written on it.
pub struct Chart<'a> {
    /// The text above the chart.
    pub title: &'a str,
    /// The meaning of the places.
    pub across: &'a str,
    /// The names of the places, from left to right.
    pub places: &'a [&'a str],
    /// The meaning of the figures, with their unit.
    pub up: &'a str,
    /// The lines, or the bars of each place.
    pub series: Vec<Series<'a>>,
}

/// The figures of one line, or of the bars of one colour.
pub struct Series<'a> {
    /// The name in the legend.
    pub name: &'a str,
    /// The colour of the line or the bars.
    pub colour: Colour,
    /// The figure at each place. `None` if a place has no figure.
    pub figures: Vec<Option<f64>>,
}

impl Chart<'_> {
    /// Draws a line for each series.
    pub fn lines(&self) -> anyhow::Result<String> {
        let axis = Axis::over(self.figures());
        let last = self.places.len() as f64 - 1.0;
        let places = (0..self.places.len()).map(|place| place as f64).collect();
        let across = Marked {
            range: -0.2..last + 0.2,
            marks: places,
        };
        let width = (PLACE * self.places.len() as u32).max(NARROWEST);
        self.drawn(width, across, &axis, |plot| {
            for series in &self.series {
                let places = (0..).map(f64::from).zip(&series.figures);
                let points = places.filter_map(|(place, figure)| Some((place, axis.at(*figure)?)));
                let style = series.colour.stroke_width(2);
                plot.draw_series(LineSeries::new(points.clone(), style))?;
                plot.draw_series(points.map(|point| Circle::new(point, 3, style.filled())))?;
            }
            Ok(())
        })
    }

    /// Draws a bar for each series at each place where it has a figure, up or down from 1.
    pub fn ratios(&self) -> anyhow::Result<String> {
        // The axis shows 0.5 to 2 even if all figures are alike, since readers look for the distance from 1.
        let around = [Some(0.5), Some(2.0)];
        let axis = Axis::over(self.figures().chain(around));
        let count = self.places.len();
        let middles = (0..count).map(|place| place as f64 + 0.5).collect();
        let across = Marked {
            range: 0.0..count as f64,
            marks: middles,
        };
        let width = FILLED / self.series.len().max(1) as f64;
        self.drawn(100 * count.max(3) as u32, across, &axis, |plot| {
            for place in 0..count {
                let bar = |series: &Series<'_>| {
                    let top = axis.at(*series.figures.get(place)?)?;
                    Some((series.colour, top))
                };
                let bars: Vec<_> = self.series.iter().filter_map(bar).collect();
                let left = place as f64 + (1.0 - width * bars.len() as f64) / 2.0;
                plot.draw_series(bars.iter().enumerate().map(|(at, (colour, top))| {
                    let left = left + width * at as f64;
                    // The logarithm of 1 is 0.
                    Rectangle::new([(left, 0.0), (left + width, *top)], colour.filled())
                }))?;
            }
            plot.draw_series(LineSeries::new([(0.0, 0.0), (count as f64, 0.0)], BLACK))?;
            Ok(())
        })
    }

    fn figures(&self) -> impl Iterator<Item = Option<f64>> {
        let series = self.series.iter();
        series.flat_map(|series| series.figures.iter().copied())
    }

    /// Draws the chart. `paint` draws what is over the places, which take `width` pixels.
    fn drawn(
        &self,
        width: u32,
        across: Marked,
        axis: &Axis,
        paint: impl FnOnce(&mut Plot<'_, '_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<String> {
        ensure!(!self.places.is_empty(), "{} shows nothing", self.title);
        let places = across.marks.clone();
        let name = |at: &f64| {
            let place = places.iter().position(|place| place == at);
            place.map_or_else(String::new, |place| self.places[place].to_owned())
        };
        let (low, high) = axis.ends();
        let up = Marked {
            range: low..high,
            marks: axis.marks.iter().map(|mark| mark.log10()).collect(),
        };

        let size = (BESIDE + width + LEGEND, HEIGHT);
        let mut svg = String::new();
        {
            let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
            area.fill(&WHITE)?;
            let area = area.titled(self.title, TITLE)?;
            let (left, right) = area.split_horizontally(BESIDE + width);
            self.write_names(&right)?;
            let mut plot = ChartBuilder::on(&left)
                .margin(10)
                .x_label_area_size(44)
                .y_label_area_size(BESIDE - 20)
                .build_cartesian_2d(across, up)?;
            plot.configure_mesh()
                .disable_x_mesh()
                .label_style(LABEL)
                .axis_desc_style(LABEL)
                .x_desc(self.across)
                .y_desc(self.up)
                .x_label_formatter(&name)
                .y_label_formatter(&|mark| written(10_f64.powf(*mark)))
                .draw()?;
            paint(&mut plot)?;
            area.present()?;
        }
        Ok(svg)
    }

    fn write_names(&self, area: &Area<'_>) -> anyhow::Result<()> {
        for (series, line) in self.series.iter().zip(1..) {
            let top = line * LINE_HEIGHT;
            let patch = [(0, top), (12, top + 12)];
            area.draw(&Rectangle::new(patch, series.colour.filled()))?;
            area.draw(&Text::new(series.name, (18, top + 1), LABEL))?;
        }
        Ok(())
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Plot<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<Marked, Marked>>;

/// A range with the marks that this module chooses. (Plotters cannot label its own as needed.)
struct Marked {
    range: Range<f64>,
    marks: Vec<f64>,
}

impl Ranged for Marked {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        RangedCoordf64::from(self.range()).map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        match hint.weight().allow_light_points() {
            true => Vec::new(),
            false => self.marks.clone(),
        }
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

/// The axis of the figures, from its first mark to its last. It is logarithmic, so it shows only figures
/// above zero. For plotters it is a plain axis, of logarithms.
struct Axis {
    marks: Vec<f64>,
}

impl Axis {
    /// An axis with room for all `figures` that can be shown.
    fn over(figures: impl Iterator<Item = Option<f64>>) -> Self {
        let shown: Vec<f64> = figures
            .flatten()
            .filter(|figure| is_shown(*figure))
            .collect();
        let highest = shown.iter().copied().fold(0.0, f64::max);
        let lowest = shown.iter().copied().fold(LARGEST, f64::min);
        let marks = if shown.is_empty() {
            vec![1.0, 10.0]
        } else {
            let marks = between(&[1.0, 2.0, 5.0], lowest, highest);
            if marks.len() > MOST_MARKS {
                between(&[1.0], lowest, highest)
            } else {
                marks
            }
        };
        Self { marks }
    }

    fn ends(&self) -> (f64, f64) {
        let (first, last) = (self.marks[0], self.marks[self.marks.len() - 1]);
        (first.log10(), last.log10())
    }

    /// The position of a figure; `None` if it cannot be shown.
    fn at(&self, figure: Option<f64>) -> Option<f64> {
        let figure = figure.filter(|figure| is_shown(*figure))?;
        let (low, high) = self.ends();
        Some(figure.log10().clamp(low, high))
    }
}

fn is_shown(figure: f64) -> bool {
    figure > 0.0 && figure <= LARGEST
}

/// The round figures from below `lowest` to above `highest`.
fn between(digits: &[f64], lowest: f64, highest: f64) -> Vec<f64> {
    let all: Vec<f64> = round_figures(digits).collect();
    let first = all.iter().rposition(|mark| *mark < lowest).unwrap_or(0);
    let last = all.iter().position(|mark| *mark > highest);
    all[first..=last.unwrap_or(all.len() - 1)].to_vec()
}

/// Each of these digits with any number of zeros, rising.
fn round_figures(digits: &[f64]) -> impl Iterator<Item = f64> {
    (-6..=12).flat_map(move |zeros| digits.iter().map(move |digit| digit * 10_f64.powi(zeros)))
}

/// A mark as text: `25,000`, `0.05`.
fn written(mark: f64) -> String {
    let text = format!("{mark:.6}");
    let (whole, decimals) = text.split_once('.').expect("it has six decimals");
    let decimals = decimals.trim_end_matches('0');
    let mut grouped = String::new();
    for (at, digit) in whole.chars().enumerate() {
        if at > 0 && (whole.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    match decimals {
        "" => grouped,
        decimals => format!("{grouped}.{decimals}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marks(figures: &[f64]) -> Vec<String> {
        let axis = Axis::over(figures.iter().copied().map(Some));
        let marks = axis.marks.iter();
        marks.map(|mark| written(*mark)).collect()
    }

    #[test]
    fn axis_marks_are_round_and_enclose_all_figures() {
        let odd = [0.0, -1.0, f64::INFINITY, f64::NAN];
        let of = |figures: [f64; 2]| marks(&[&figures[..], &odd].concat());
        assert_eq!(of([0.03, 0.4]), ["0.02", "0.05", "0.1", "0.2", "0.5"]);
        assert_eq!(of([5.0, 5.0]), ["2", "5", "10"]);
        let wide = of([20.0, 9_000_000.0]);
        assert_eq!(
            wide.join(" "),
            "10 100 1,000 10,000 100,000 1,000,000 10,000,000"
        );
    }

    #[test]
    fn any_figures_at_all_can_be_drawn() -> anyhow::Result<()> {
        let figures = [
            vec![],
            vec![None, None],
            vec![Some(0.0), Some(f64::NAN)],
            vec![Some(f64::INFINITY), Some(f64::MAX)],
            vec![Some(-1.0), Some(f64::MIN_POSITIVE)],
            vec![Some(1e-9), Some(1e12)],
            vec![Some(1.0), Some(2.0), Some(3.0)],
        ];
        for figures in figures {
            let series = vec![Series {
                name: "one < two",
                colour: BLACK,
                figures,
            }];
            let chart = Chart {
                title: "any",
                across: "place",
                places: &["here", "there"],
                up: "figure",
                series,
            };
            for svg in [chart.lines()?, chart.ratios()?] {
                for text in ["any", "place", "here", "there", "figure", "one &lt; two"] {
                    assert!(svg.contains(text), "{text}: {svg}");
                }
                assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN"), "{svg}");
            }
        }
        Ok(())
    }
}
