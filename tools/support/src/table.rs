//! The look of tables on a terminal. Knows nothing of their content.

use comfy_table::{CellAlignment, Table, presets};

/// A table without lines. The first `names` columns are text, and the others are figures.
pub fn plain(mut table: Table, names: usize) -> String {
    table.load_style(presets::NOTHING);
    align(&mut table, names);
    table.to_string()
}

/// A table in a frame, for a place between sentences.
pub fn framed(mut table: Table, names: usize) -> String {
    table.load_style(presets::UTF8_BORDERS_ONLY);
    align(&mut table, names);
    table.lines().map(|line| format!("   {line}\n")).collect()
}

fn align(table: &mut Table, names: usize) {
    for column in table.column_iter_mut().skip(names) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}
