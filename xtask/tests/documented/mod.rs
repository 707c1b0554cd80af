//! Reads the library's public items as syntax: which of them has no example in its docs. Test code is exempt.

use std::collections::{BTreeMap, HashSet};

use syn::{Attribute, Expr, ImplItem, Item, ItemImpl, Lit, Meta, Type, Visibility};

/// A public type or trait of one file, and its public functions.
#[derive(Default)]
struct Public {
    docs: String,
    functions: Vec<(String, String)>,
}

/// The names in `public` (those at the crate's top) that this file defines without an example: types and
/// traits without an example in their docs, functions without one in theirs or their type's.
pub fn never_shown(text: &str, public: &HashSet<String>) -> Vec<String> {
    let file = syn::parse_file(text).expect("the library is Rust");
    let mut types = BTreeMap::<String, Public>::new();
    for item in &file.items {
        match item {
            Item::Struct(item) => add(&mut types, &item.ident, &item.attrs),
            Item::Enum(item) => add(&mut types, &item.ident, &item.attrs),
            Item::Trait(item) => add(&mut types, &item.ident, &item.attrs),
            Item::Impl(item) if item.trait_.is_none() => add_functions(&mut types, item),
            _ => {}
        }
    }
    let mut found = Vec::new();
    for (name, item) in types.iter().filter(|(name, _)| public.contains(*name)) {
        let shown = examples(&item.docs);
        if shown.is_empty() {
            found.push(name.clone());
        }
        for (function, docs) in &item.functions {
            if examples(docs).is_empty() && !shown.contains(&format!("{function}(")) {
                found.push(format!("{name}::{function}"));
            }
        }
    }
    found
}

fn add(types: &mut BTreeMap<String, Public>, name: &syn::Ident, attributes: &[Attribute]) {
    types.entry(name.to_string()).or_default().docs += &docs(attributes);
}

fn add_functions(types: &mut BTreeMap<String, Public>, item: &ItemImpl) {
    let Type::Path(path) = &*item.self_ty else {
        return;
    };
    let name = path.path.segments.last().expect("a path has a name");
    let public = types.entry(name.ident.to_string()).or_default();
    for item in &item.items {
        if let ImplItem::Fn(function) = item
            && matches!(function.vis, Visibility::Public(_))
        {
            let name = function.sig.ident.to_string();
            public.functions.push((name, docs(&function.attrs)));
        }
    }
}

fn docs(attributes: &[Attribute]) -> String {
    let mut text = String::new();
    for attribute in attributes
        .iter()
        .filter(|found| found.path().is_ident("doc"))
    {
        if let Meta::NameValue(pair) = &attribute.meta
            && let Expr::Lit(value) = &pair.value
            && let Lit::Str(line) = &value.lit
        {
            text += &line.value();
            text.push('\n');
        }
    }
    text
}

/// The public functions in the macros of a file whose docs have no example. Reads lines, since macros are no syntax of
/// Rust: `$Type` and `#[doc = concat!(..)]` stand in them.
pub fn never_shown_in_macros(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut docs = String::new();
    let lines = text.lines().map(str::trim_end);
    let mut lines = lines.skip_while(|line| !line.starts_with("macro_rules! "));
    while let Some(line) = lines.next() {
        if line == "}" {
            lines.find(|line| line.starts_with("macro_rules! "));
            continue;
        }
        let line = line.trim_start();
        if let Some(doc) = line.strip_prefix("///") {
            docs += doc.trim_start();
            docs.push('\n');
        } else if let Some(function) = line.strip_prefix("pub fn ") {
            if examples(&docs).is_empty() {
                let name = function.split(['(', '<']).next();
                found.push(name.unwrap_or_default().to_owned());
            }
            docs.clear();
        } else if line.starts_with("#[doc = concat!(") {
            docs.push_str("..\n");
        } else {
            docs.clear();
        }
    }
    found
}

/// The blocks of Rust in a text that compile.
fn examples(docs: &str) -> String {
    let mut blocks = docs.split("```");
    let mut code = String::new();
    while let (Some(_), Some(block)) = (blocks.next(), blocks.next()) {
        let (language, block) = block.split_once('\n').unwrap_or_default();
        if ["", "rust", "no_run", "rust,no_run"].contains(&language) {
            code += block;
        }
    }
    code
}

/// The variants of a public enum of this file.
pub fn variants(text: &str, name: &str) -> Vec<String> {
    let file = syn::parse_file(text).expect("the library is Rust");
    let found = file.items.iter().find_map(|item| match item {
        Item::Enum(item) if item.ident == name => Some(item),
        _ => None,
    });
    let variants = &found.expect("the enum is there").variants;
    let mut names: Vec<_> = variants.iter().map(|it| it.ident.to_string()).collect();
    names.sort();
    names
}

/// The first cells, without their backticks, of the table of a page whose first column has this title.
pub fn first_column(page: &str, title: &str) -> Vec<String> {
    let head = format!("| `{title}` |");
    let rows = page.lines().skip_while(|line| !line.starts_with(&head));
    let rows = rows.skip(2).take_while(|line| line.starts_with('|'));
    let cell = |line: &str| line.split('`').nth(1).unwrap_or_default().to_owned();
    let mut cells: Vec<_> = rows.map(cell).collect();
    cells.sort();
    cells
}

/// The quoted texts in the last column of each table of a page whose last column has this title.
pub fn last_column(page: &str, title: &str) -> Vec<String> {
    let (head, mut is_inside, mut quoted) = (format!("| {title} |"), false, Vec::new());
    for line in page.lines() {
        if !line.starts_with('|') {
            is_inside = false;
        } else if line.ends_with(&head) {
            is_inside = true;
        } else if is_inside {
            let cell = line.trim_end_matches('|').rsplit('|').next();
            let words = cell.unwrap_or_default().split('`').skip(1).step_by(2);
            quoted.extend(words.map(str::to_owned));
        }
    }
    quoted
}

#[test]
fn public_items_without_examples_are_found() {
    let text = "
        /// Has one.
        /// ```
        /// Shown::new().with_it();
        /// ```
        pub struct Shown;
        impl Shown {
            pub fn new() {} pub fn with_it() {}
            pub fn without() {}
            fn private() {} pub(crate) fn ours() {}
            /// ```compile_fail
            /// wrong()
            /// ```
            pub fn wrong() {}
        }
        /// ```sql
        /// SELECT 1
        /// ```
        pub enum Bare {}
        pub struct Inner;
    ";
    let public = ["Shown", "Bare"].map(str::to_owned).into();
    let found = never_shown(text, &public);
    assert_eq!(found, ["Bare", "Shown::without", "Shown::wrong"]);
}

#[test]
fn functions_of_macros_without_examples_are_found() {
    let text = r#"
pub fn outside() {}
macro_rules! calls {
    ($Type:ident, $lock:ident) => {
        impl $Type {
            /// Has one.
            ///
            /// ```
            #[doc = concat!("lock.", stringify!($lock), "()")]
            /// ```
            pub fn $lock(&self) {}

            /// Has none.
            pub fn without<T>(&self) {}
        }
    };
}
pub fn between() {}
macro_rules! more {
            pub fn last() {}
}
    "#;
    assert_eq!(never_shown_in_macros(text), ["without", "last"]);
}

#[test]
fn a_table_is_found_by_its_title() {
    let page = "| `A` | x |\n|---|---|\n| `c` | 1 |\n| `b` | `2` |\n\n| `d` | 3 |\n";
    assert_eq!(first_column(page, "A"), ["b", "c"]);
    assert!(first_column(page, "B").is_empty());
    let page =
        "| x | tests |\n|---|---|\n| `c` | `a`, `b` |\n\n| x | y |\n|---|---|\n| `d` | `e` |\n";
    assert_eq!(last_column(page, "tests"), ["a", "b"]);
}
