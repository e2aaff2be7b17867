"""Place recognition: global descriptor plug-ins and indexes over them."""
