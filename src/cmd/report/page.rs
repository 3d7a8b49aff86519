//! The page: a template, its style and its script, and the data as JSON.

use serde_json::Value;

use crate::cmd::output::PAGE;

const TEMPLATE: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/page.css");
/// The parts of the script, in the order in which they are needed.
const SCRIPT: [&str; 7] = [
    include_str!("page/base.js"),
    include_str!("page/chart.js"),
    include_str!("page/points.js"),
    include_str!("page/evals.js"),
    include_str!("page/map.js"),
    include_str!("page/head.js"),
    include_str!("page/facts.js"),
];

/// Writes the page. `summary` is shown where scripts do not run.
pub fn write(data: &Value, summary: &str) -> String {
    // Neither the data nor the summary can have a mark of the template: every `<` in them is escaped.
    let filled = TEMPLATE
        .replacen("<!--style-->", STYLE, 1)
        .replacen("<!--script-->", &SCRIPT.concat(), 1)
        .replacen("<!--summary-->", &escaped(summary), 1)
        .replacen("<!--data-->", &data.to_string().replace('<', "\\u003c"), 1);
    format!("{PAGE}\n{filled}")
}

/// Escapes text for HTML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn text_cannot_end_the_data_or_fill_a_mark() {
        let data = json!({ "name": "</script><script>alert(1)</script><!--summary-->" });
        let page = write(&data, "<b>&</b><!--data-->");
        assert!(page.contains("&lt;b&gt;&amp;&lt;/b&gt;&lt;!--data--&gt;"));
        assert!(page.contains("\\u003c/script>\\u003cscript>alert(1)\\u003c/script>\\u003c!--summary-->"));
        assert!(!page.contains("<script>alert"));
        assert!(!page.contains("<!--data-->") && !page.contains("<!--style-->"));
    }
}
