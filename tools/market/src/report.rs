//! Tables of the runs' results beside the article's results, for the terminal and for the page.

use std::time::Duration;

use comfy_table::Table;

use crate::article;
use crate::load::{Load, Run};
use crate::methods::Way;

/// A load, and one run for each way, as in `Way::ALL`.
pub struct Scene {
    pub load: Load,
    pub runs: Vec<Run>,
}

/// The article's three loads: the figures of this machine, and to the right of the bar the article's figures.
pub fn compared(scenes: &[Scene]) -> Table {
    let mut table = table(&[
        "load",
        "way",
        "listed",
        "bought",
        "retries",
        "mean wait",
        "p50",
        "p99",
        "| listed",
        "bought",
        "retries",
        "mean wait",
    ]);
    for (scene, article) in scenes.iter().zip(&article::TABLE) {
        for (n, run) in scene.runs.iter().enumerate() {
            let mut row = vec![
                scene.load.name(),
                run.way.name().to_owned(),
                run.listed.to_string(),
                run.bought.to_string(),
                run.retries.to_string(),
                milliseconds(run.waits.mean()),
                milliseconds(run.waits.quantile(0.5)),
                milliseconds(run.waits.quantile(0.99)),
            ];
            match article.get(n) {
                Some(theirs) => row.extend([
                    format!("| {}", theirs.listed),
                    theirs.bought.to_string(),
                    theirs.retries.to_string(),
                    format!("{} ms", theirs.wait),
                ]),
                None => row.push("|       ".to_owned()),
            }
            table.add_row(row);
        }
    }
    table
}

/// How much better a lock per item is than WATCH, in the article and here.
pub fn ratios(scenes: &[Scene]) -> Table {
    let mut table = table(&[
        "load",
        "lock per item compared with",
        "article",
        "WATCH, plain",
        "WATCH",
        "WATCH, if with transaction",
    ]);
    for (scene, article) in scenes.iter().zip(&article::TABLE) {
        let run = |way| scene.runs.iter().find(|run| run.way == way);
        let [theirs, _, theirs_item] = article;
        let bought = |more, less| {
            ratio(
                run(more).map(Run::per_second),
                run(less).map(Run::per_second),
            )
        };
        table.add_row([
            scene.load.name(),
            "bought, ratio".to_owned(),
            theirs_item.bought.over(theirs.bought),
            bought(Way::ItemLock, Way::PlainWatch),
            bought(Way::ItemLock, Way::Watch),
            bought(Way::Transaction, Way::Watch),
        ]);
        let wait = |way| Some(run(way)?.waits.mean()?.as_secs_f64());
        table.add_row([
            scene.load.name(),
            "mean wait, ratio".to_owned(),
            theirs.wait.over(theirs_item.wait),
            ratio(wait(Way::PlainWatch), wait(Way::ItemLock)),
            ratio(wait(Way::Watch), wait(Way::ItemLock)),
            ratio(wait(Way::Watch), wait(Way::Transaction)),
        ]);
    }
    table
}

/// Buyers that want the same items.
pub fn waiting(scenes: &[Scene]) -> Table {
    let mut table = table(&[
        "buyers want",
        "way",
        "bought/s",
        "retries",
        "too late",
        "mean wait",
        "p50",
        "p99",
        "bought by one buyer",
    ]);
    for scene in scenes {
        for run in &scene.runs {
            let after = match scene.load.among {
                Some(1) => "the cheapest item".to_owned(),
                Some(some) => format!("one of the {some} cheapest"),
                None => "any item".to_owned(),
            };
            table.add_row([
                format!("{} want {after}", scene.load.buyers),
                run.way.name().to_owned(),
                format!("{:.0}", run.per_second()),
                run.retries.to_string(),
                run.late.to_string(),
                milliseconds(run.waits.mean()),
                milliseconds(run.waits.quantile(0.5)),
                milliseconds(run.waits.quantile(0.99)),
                format!("{} to {}", run.shares.0, run.shares.1),
            ]);
        }
    }
    table
}

/// Transactions that take longer and longer.
pub fn dogpile(scenes: &[Scene]) -> Table {
    let mut table = table(&[
        "work in a deal",
        "way",
        "bought/s",
        "retries",
        "attempts per purchase",
        "mean wait",
        "p99",
        "longest unfinished",
    ]);
    for scene in scenes {
        for run in &scene.runs {
            let tries = (run.bought + run.retries + run.late) as f64 / run.bought as f64;
            table.add_row([
                format!("{} ms", scene.load.length.as_millis()),
                run.way.name().to_owned(),
                format!("{:.0}", run.per_second()),
                run.retries.to_string(),
                if tries.is_finite() {
                    format!("{tries:.2}")
                } else {
                    String::new()
                },
                milliseconds(run.waits.mean()),
                milliseconds(run.waits.quantile(0.99)),
                milliseconds(run.unfinished),
            ]);
        }
    }
    table
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.set_header(header.iter().copied());
    table
}

fn milliseconds(time: Option<Duration>) -> String {
    time.map_or_else(String::new, |time| {
        format!("{:.2} ms", time.as_secs_f64() * 1e3)
    })
}

/// The ratio as text. A dash if one of the two numbers is missing.
fn ratio(number: Option<f64>, of: Option<f64>) -> String {
    let ratio = number.zip(of).map(|(number, of)| number / of);
    match ratio.filter(|ratio| ratio.is_finite()) {
        Some(ratio) => format!("{ratio:.1}"),
        None => "-".to_owned(),
    }
}
