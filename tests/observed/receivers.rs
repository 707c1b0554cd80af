//! The receivers of the features in these tests: a subscriber that takes notes and a recorder that counts.
//! Both panic when a test asks them to.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

use metrics::{
    Counter, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;

pub type Fields = HashMap<&'static str, String>;

/// A span that has ended, or an event, with the name of the span around it.
#[derive(Clone, Debug)]
pub struct Recorded {
    pub name: String,
    pub fields: Fields,
    pub within: Option<&'static str>,
}

/// When the subscriber and the recorder panic: never, when a span is entered or left, or always.
static PANICKING: AtomicU8 = AtomicU8::new(0);
pub const AT_SPANS: u8 = 1;
pub const ALWAYS: u8 = 2;

/// The threads of the library on which spans and events came.
pub static RECORDED_ON: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

fn note_the_thread() {
    let thread = std::thread::current();
    if let Some(name) = thread.name().filter(|name| name.starts_with("leasehold-")) {
        RECORDED_ON.lock().unwrap().insert(name.to_owned());
    }
}

fn panic_if_asked_to() {
    note_the_thread();
    assert!(
        PANICKING.load(Ordering::SeqCst) < ALWAYS,
        "a receiver's own panic"
    );
}

pub struct Panicking;

impl Panicking {
    pub fn begin(at: u8) -> Self {
        PANICKING.store(at, Ordering::SeqCst);
        Self
    }
}

impl Drop for Panicking {
    fn drop(&mut self) {
        PANICKING.store(0, Ordering::SeqCst);
    }
}

#[derive(Clone, Default)]
struct Notebook(Arc<Mutex<Vec<Recorded>>>);

struct Fill<'a>(&'a mut Fields);

impl Visit for Fill<'_> {
    /// As a subscriber that writes plain text.
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }

    /// A token must be text: readers of JSON round numbers of that size.
    fn record_u64(&mut self, field: &Field, value: u64) {
        let text = match field.name() {
            "token" => format!("the number {value}"),
            _ => value.to_string(),
        };
        self.0.insert(field.name(), text);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let text = format!("{value:?}").trim_matches('"').to_owned();
        self.0.insert(field.name(), text);
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Notebook {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        panic_if_asked_to();
        let mut fields = Fields::new();
        attributes.record(&mut Fill(&mut fields));
        context.span(id).unwrap().extensions_mut().insert(fields);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        panic_if_asked_to();
        let span = context.span(id).unwrap();
        let mut extensions = span.extensions_mut();
        values.record(&mut Fill(extensions.get_mut::<Fields>().unwrap()));
    }

    fn on_enter(&self, _: &Id, _: Context<'_, S>) {
        assert_eq!(
            PANICKING.load(Ordering::SeqCst),
            0,
            "a receiver's own panic"
        );
    }

    fn on_exit(&self, _: &Id, _: Context<'_, S>) {
        assert_eq!(
            PANICKING.load(Ordering::SeqCst),
            0,
            "a receiver's own panic"
        );
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        panic_if_asked_to();
        let span = context.span(&id).unwrap();
        let fields = span.extensions_mut().remove::<Fields>().unwrap();
        self.0.lock().unwrap().push(Recorded {
            name: span.name().to_owned(),
            fields,
            within: span.parent().map(|parent| parent.name()),
        });
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        panic_if_asked_to();
        let mut fields = Fields::new();
        event.record(&mut Fill(&mut fields));
        self.0.lock().unwrap().push(Recorded {
            name: fields.remove("message").unwrap_or_default(),
            fields,
            within: context.event_span(event).map(|span| span.name()),
        });
    }
}

/// The levels of the gauges by their names. (The debugging recorder resets its gauges when they are read.)
#[derive(Clone, Default)]
struct Levels(Arc<Mutex<HashMap<String, f64>>>);

struct Level {
    name: String,
    levels: Levels,
}

impl Level {
    fn change(&self, to: impl FnOnce(f64) -> f64) {
        let mut levels = self.levels.0.lock().unwrap();
        let level = levels.entry(self.name.clone()).or_default();
        *level = to(*level);
    }
}

impl GaugeFn for Level {
    fn increment(&self, by: f64) {
        self.change(|level| level + by);
    }

    fn decrement(&self, by: f64) {
        self.change(|level| level - by);
    }

    fn set(&self, to: f64) {
        self.change(|_| to);
    }
}

/// `name{label=value}`
fn named(key: &Key) -> String {
    let labels = key.labels();
    let labels: String = labels
        .map(|label| format!("{{{}={}}}", label.key(), label.value()))
        .collect();
    format!("{}{labels}", key.name())
}

struct Numbers {
    counted: DebuggingRecorder,
    levels: Levels,
}

impl Recorder for Numbers {
    fn describe_counter(&self, key: KeyName, unit: Option<Unit>, text: SharedString) {
        panic_if_asked_to();
        self.counted.describe_counter(key, unit, text);
    }

    fn describe_gauge(&self, key: KeyName, unit: Option<Unit>, text: SharedString) {
        panic_if_asked_to();
        self.counted.describe_gauge(key, unit, text);
    }

    fn describe_histogram(&self, key: KeyName, unit: Option<Unit>, text: SharedString) {
        panic_if_asked_to();
        self.counted.describe_histogram(key, unit, text);
    }

    fn register_counter(&self, key: &Key, metadata: &Metadata<'_>) -> Counter {
        panic_if_asked_to();
        self.counted.register_counter(key, metadata)
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        panic_if_asked_to();
        Gauge::from_arc(Arc::new(Level {
            name: named(key),
            levels: self.levels.clone(),
        }))
    }

    fn register_histogram(&self, key: &Key, metadata: &Metadata<'_>) -> Histogram {
        panic_if_asked_to();
        self.counted.register_histogram(key, metadata)
    }
}

/// The counters of a recorder of its own since the last call: `name{label=value}`, and the count.
pub fn series_of(recorder: &DebuggingRecorder) -> HashMap<String, f64> {
    let snapshot = recorder.snapshotter().snapshot().into_vec();
    let counters = snapshot.into_iter().filter_map(|(key, _, _, value)| {
        let DebugValue::Counter(count) = value else {
            return None;
        };
        Some((named(key.key()), count as f64))
    });
    counters.collect()
}

pub struct Receivers {
    notebook: Notebook,
    numbers: Snapshotter,
    levels: Levels,
}

static RECEIVERS: LazyLock<Mutex<Receivers>> = LazyLock::new(|| {
    let notebook = Notebook::default();
    let subscriber = tracing_subscriber::registry().with(notebook.clone());
    tracing::subscriber::set_global_default(subscriber).unwrap();
    let (counted, levels) = (DebuggingRecorder::new(), Levels::default());
    let numbers = counted.snapshotter();
    let recorder = Numbers {
        counted,
        levels: levels.clone(),
    };
    let installed = metrics::set_global_recorder(recorder);
    assert!(installed.is_ok(), "the only recorder");
    Mutex::new(Receivers {
        notebook,
        numbers,
        levels,
    })
});

/// Lets one test run at a time, and clears notes and numbers.
pub fn receivers() -> MutexGuard<'static, Receivers> {
    let receivers = RECEIVERS
        .lock()
        .unwrap_or_else(|failed| failed.into_inner());
    receivers.notebook.0.lock().unwrap().clear();
    receivers.numbers();
    receivers.levels.0.lock().unwrap().clear();
    receivers
}

impl Receivers {
    /// The spans and events of this name since the last call.
    pub fn recorded(&self, name: &str) -> Vec<Recorded> {
        let all = self.notebook.0.lock().unwrap();
        all.iter()
            .filter(|recorded| recorded.name == name)
            .cloned()
            .collect()
    }

    /// All that was recorded since the last call: spans and events with their fields, and numbers with their labels.
    pub fn everything(&self) -> String {
        let notes = self.notebook.0.lock().unwrap();
        let levels = self.levels.0.lock().unwrap();
        format!("{notes:#?}\n{:#?}\n{levels:#?}", self.numbers())
    }

    /// The level of the gauge of this name; `None` if it was never set.
    pub fn level(&self, name: &str) -> Option<f64> {
        self.levels.0.lock().unwrap().get(name).copied()
    }

    /// The records of the histogram of this name since numbers were last read.
    pub fn seconds(&self, name: &str) -> Vec<f64> {
        let snapshot = self.numbers.snapshot().into_vec();
        let values = snapshot
            .into_iter()
            .filter(|(key, ..)| named(key.key()) == name);
        let values = values.flat_map(|(.., value)| match value {
            DebugValue::Histogram(values) => values,
            other => panic!("{name} is {other:?}"),
        });
        values.map(f64::from).collect()
    }

    /// The counters and histograms since the last call: `name{label=value}`, and the count or the number of
    /// records.
    pub fn numbers(&self) -> HashMap<String, f64> {
        let number = |value: DebugValue| match value {
            DebugValue::Counter(count) => count as f64,
            DebugValue::Gauge(_) => unreachable!("levels are kept apart"),
            DebugValue::Histogram(values) => values.len() as f64,
        };
        let snapshot = self.numbers.snapshot().into_vec();
        let numbers = snapshot.into_iter();
        let numbers = numbers.map(|(key, _, _, value)| (named(key.key()), number(value)));
        numbers.collect()
    }
}
