"""SGLang's servers: started, asked what training needs of them, and the dialect that the client speaks to them."""
